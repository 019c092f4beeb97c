"""The demo model's server: an OpenAI-compatible endpoint on a thread and loop of its own.

It answers whatever the caller's loop is doing. Same seed and same requests give the same
answers. Every connection is owned here and ended by stop().
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import random
import threading
from collections import Counter, deque
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from envbus.demo_model import http
from envbus.demo_model.answers import Answer, Conversation, answer
from envbus.demo_model.completions import Completion
from envbus.demo_model.http import HttpError, HttpRequest
from envbus.errors import UsageError

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "demo-model"
DEFAULT_CONTEXT_LENGTH = 32_768

Fault = int | Literal["disconnect", "garbage", "empty"]
"""How a request goes wrong: a status, a cut connection, a body that is not JSON, or an answer without text.

The status 200 is no fault: that request is answered as usual."""

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0
_MAX_PROMPTS_COUNTED = 100_000


class DemoModel:
    """A running demo endpoint; a context manager that stops it.

    Attributes:
        base_url: What OpenAI clients want, with ``/v1``.
        model: The name that it lists; requests may name any.
        requests: Chat completions asked for so far, failed ones included.
    """

    def __init__(self, *, seed: int, delay_s: float, model: str, context_length: int, host: str, port: int) -> None:
        self.model = model
        self.requests = 0
        self.base_url = ""
        self._seed = seed
        self._delay_s = delay_s
        self._context_length = context_length
        self._address = (host, port)
        self._faults: deque[Fault] = deque()
        self._prompt_counts: Counter[bytes] = Counter()
        self._connections: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        *,
        seed: int = 0,
        delay_s: float = 0.0,
        model: str = DEFAULT_MODEL,
        context_length: int = DEFAULT_CONTEXT_LENGTH,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> DemoModel:
        """Start an endpoint and return once it listens.

        Args:
            seed: Same seed and same requests, same answers. A request's own ``seed`` fixes its answer; without
                one, the same prompt asked again is answered anew.
            delay_s: Seconds before each answer.
            model: The name that it lists.
            context_length: Most tokens of prompt and completion; more is a 400 ``context_length_exceeded``.
            host: Address to listen on.
            port: 0 takes a free one.

        Raises:
            UsageError: The address cannot be listened on.
        """
        demo = cls(seed=seed, delay_s=delay_s, model=model, context_length=context_length, host=host, port=port)
        listening: Future[str] = Future()
        demo._thread = threading.Thread(
            target=lambda: asyncio.run(demo._serve(listening)), name="envbus-demo-model", daemon=True
        )
        demo._thread.start()
        demo.base_url = listening.result(timeout=_START_TIMEOUT_S)
        return demo

    def fail_next(self, *faults: Fault) -> None:
        """Let the next chat requests go wrong, one fault each, in the order they arrive."""
        self._faults.extend(faults)

    def stop(self) -> None:
        """End all connections and the thread; connecting is refused from then on. May be called twice."""
        if self._thread is None or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def _serve(self, listening: Future[str]) -> None:
        self._loop = asyncio.get_running_loop()
        host, port = self._address
        try:
            server = await asyncio.start_server(self._on_connect, host, port, backlog=1024)
        except OSError as exc:
            listening.set_exception(UsageError(f"the demo model cannot listen on {host}:{port}: {exc}"))
            return
        listening.set_result(f"http://{host}:{server.sockets[0].getsockname()[1]}/v1")
        await self._stopping.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._talk(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another."""
        try:
            while await self._answer_next(reader, writer):
                pass
        except (OSError, TimeoutError):
            pass  # the client has gone, or reads nothing
        except Exception:
            logger.exception("the demo model failed on a request")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer_next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read and answer one request; whether the connection stays open."""
        try:
            request = await http.read_request(reader)
        except HttpError as exc:
            await http.send(writer, http.json_response(exc.body(), status=exc.status))
            return False
        if request is None:
            return False
        try:
            keep = await self._route(request, writer)
        except HttpError as exc:
            await http.send(writer, http.json_response(exc.body(), status=exc.status))
            keep = True
        return keep and request.headers.get("connection", "").lower() != "close"

    async def _route(self, request: HttpRequest, writer: asyncio.StreamWriter) -> bool:
        match request.method, request.path:
            case "GET", "/v1/models":
                entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "envbus"}
                await http.send(writer, http.json_response({"object": "list", "data": [entry]}))
                return True
            case "POST", "/v1/chat/completions":
                return await self._chat(request, writer)
        raise HttpError(404, f"there is no {request.method} {request.path} here")

    async def _chat(self, request: HttpRequest, writer: asyncio.StreamWriter) -> bool:
        self.requests += 1
        fault = self._faults.popleft() if self._faults else 200
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if fault == "disconnect":
            return False
        if fault == "garbage":
            await http.send(writer, http.response(b"<html>this is not JSON</html>"))
            return True
        if isinstance(fault, int) and fault != 200:
            raise HttpError(fault, f"the demo model was told to answer {fault}")
        body = self._checked(request.json())
        completion = self._complete(body, silent=fault == "empty")
        if not body.get("stream"):
            await http.send(writer, http.json_response(completion.body()))
            return True
        await http.send(writer, http.stream_head())
        for chunk in completion.chunks():
            await http.send(writer, http.event_chunk(json.dumps(chunk)))
        await http.send(writer, http.event_chunk("[DONE]") + http.LAST_CHUNK)
        return True

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise HttpError(400, "messages must be a list of at least one message")
        if body.get("n") not in (None, 1):
            raise HttpError(400, "the demo model gives one choice: leave n out")
        return {"model": self.model} | body

    def _complete(self, body: dict[str, Any], *, silent: bool) -> Completion:
        messages, tools = body["messages"], body.get("tools") or []
        draw = self._draw(body)
        conversation = Conversation(messages, () if body.get("tool_choice") == "none" else tools)
        reply = Answer() if silent else answer(conversation, random.Random(draw))
        return Completion(body, reply, completion_id=f"chatcmpl-{draw.hex()[:24]}", context_length=self._context_length)

    def _draw(self, body: dict[str, Any]) -> bytes:
        """What the answer's randomness comes from: the seeds and the prompt, and without a seed how often it came."""
        prompt = hashlib.sha256(json.dumps([body["messages"], body.get("tools")]).encode()).digest()
        turn: Any = body.get("seed")
        if turn is None:
            if len(self._prompt_counts) >= _MAX_PROMPTS_COUNTED:
                self._prompt_counts.clear()
            self._prompt_counts[prompt] += 1
            turn = f"call {self._prompt_counts[prompt]}"
        return hashlib.sha256(f"{self._seed}/{turn}/".encode() + prompt).digest()
