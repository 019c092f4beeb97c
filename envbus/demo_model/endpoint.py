"""The demo model's server: an OpenAI-compatible endpoint on a thread and loop of its own.

It answers whatever the caller's loop is doing. Same seed and same requests give the same
answers. stop() ends every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import threading
from collections import Counter, deque
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

from envbus.demo_model.answers import Answer, Conversation, answer
from envbus.demo_model.completions import Completion
from envbus.demo_model.http import HttpError, errors_as_json, json_object, send_events
from envbus.errors import UsageError

DEFAULT_MODEL = "demo-model"
DEFAULT_CONTEXT_LENGTH = 32_768

Fault = int | Literal["disconnect", "garbage", "empty"]
"""How a request goes wrong: a status, a cut connection, a body that is not JSON, or an answer without text.

The status 200 is no fault: that request is answered as usual."""

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 0.1
"""What a call that is being answered gets when the model stops."""
_MAX_BODY_BYTES = 64 * 1024 * 1024
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
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[errors_as_json])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_TIMEOUT_S)
        await runner.setup()
        host, port = self._address
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
            listening.set_result(f"http://{host}:{runner.addresses[0][1]}/v1")
            await self._stopping.wait()
        except (OSError, OverflowError) as exc:
            listening.set_exception(UsageError(f"the demo model cannot listen on {host}:{port}: {exc}"))
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "envbus"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        fault = self._faults.popleft() if self._faults else 200
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if fault == "disconnect":
            return _hang_up(request)
        if fault == "garbage":
            return web.Response(body=b"<html>this is not JSON</html>", content_type="application/json")
        if isinstance(fault, int) and fault != 200:
            raise HttpError(fault, f"the demo model was told to answer {fault}")
        body = self._checked(await json_object(request))
        completion = self._complete(body, silent=fault == "empty")
        if not body.get("stream"):
            return web.json_response(completion.body())
        return await send_events(request, [*map(json.dumps, completion.chunks()), "[DONE]"])

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


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()  # goes nowhere
