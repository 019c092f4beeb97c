"""A loopback model endpoint for tests: answers what the test says and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from envbus.types import ClientConfig

Reply = tuple[int, dict[str, str], bytes]


def completion(text: str | None = "hello", *, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion with the null fields that real endpoints send."""
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish_reason,
                "logprobs": None,
                "message": {"role": "assistant", "content": text, "refusal": None, "function_call": None, **message},
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": None},
    }


def tool_call(name: str, arguments: dict[str, Any] | str, call_id: str = "c1") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "index": 0, "function": {"name": name, "arguments": text}}


def error_reply(status: int, message: str = "no", headers: dict[str, str] | None = None) -> Reply:
    return status, headers or {}, json.dumps({"error": {"message": message}}).encode()


class ModelStub:
    """Serves until closed. ``answer`` takes the request body and returns a completion or a raw reply."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], dict[str, Any] | Reply] = lambda request: completion()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.requests.append(body)
                stub.headers.append({name.lower(): value for name, value in self.headers.items()})
                answer = stub.answer(body)
                status, headers, data = answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer).encode())
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that hang up are part of the tests."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def config(self, **settings: Any) -> ClientConfig:
        return ClientConfig(**{"api_base_url": self.url, "api_key_var": None, "max_retries": 0, **settings})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
