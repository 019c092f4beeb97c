"""A server that lies: it speaks the protocol's words to clients of one env, in whatever order and form a test wants."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import nats
from fuzz_stage import ENV
from mutations import packed
from nats.aio.client import Client

from envbus.bus.codec import decode_map, encode
from envbus.bus.subjects import Subjects
from envbus.bus.transfer import cut, pack_body

RESULT = encode({"output": {"example_id": 1, "reward": 1.0}})

Say = Callable[..., Awaitable[None]]
Script = Callable[["FakeServer", dict[str, Any], Say], Awaitable[None]]
"""Gets ``(fake server, what it heard, how to reply)``."""


class FakeServer:
    """Answers by scripts: one for what comes through the queue group, one for what comes straight to it."""

    def __init__(self, client: Client, prefix: str) -> None:
        self.client = client
        self.server = secrets.token_hex(16)
        self.subjects = Subjects(ENV, prefix)
        self.heard: list[dict[str, Any]] = []
        self.scripts: dict[str, Script] = {}
        """By kind of message; ``run`` is that of all jobs, ``wait`` of the line."""

    async def open(self) -> None:
        for subject in (self.subjects.rollout, self.subjects.info, self.subjects.examples):
            await self.client.subscribe(subject, queue="workers", cb=self._on_message)
        for subject in (self.subjects.wait, self.subjects.server(self.server)):
            await self.client.subscribe(subject, cb=self._on_message)

    async def _on_message(self, message: Any) -> None:
        fields = decode_map(message.data)
        self.heard.append(fields)

        async def say(answer: dict[str, Any] | bytes) -> None:
            data = answer if isinstance(answer, bytes) else packed(answer)
            with contextlib.suppress(nats.errors.MaxPayloadError):
                await self.client.publish(message.reply, data)

        script = self.scripts.get(fields["t"])
        if script is not None:
            await script(self, fields, say)
        elif fields["t"] in ("cancel", "done", "pass", "wait"):
            await say(self.ok())

    def kinds(self) -> list[str]:
        return [fields["t"] for fields in self.heard]

    # ---- what a server may truthfully say

    def ok(self) -> dict[str, Any]:
        return {"v": 1, "t": "ok", "server": self.server, "state": "ready"}

    def accepted(self, run: dict[str, Any], *, server: str | None = None) -> dict[str, Any]:
        return self._of(run, "accepted", server)

    def busy(self, run: dict[str, Any]) -> dict[str, Any]:
        return self._of(run, "busy") | {"reason": "full"}

    def result(self, run: dict[str, Any], body: bytes = RESULT) -> dict[str, Any]:
        return self._of(run, "result") | {"encoding": "", "body": body}

    def announce(self, run: dict[str, Any], body: bytes = RESULT, **lies: Any) -> dict[str, Any]:
        return self._of(run, "announce") | {"parts": self.parts(body) | lies}

    def failure(self, run: dict[str, Any], code: str = "remote") -> dict[str, Any]:
        causes = [["ValueError", "why"]]
        return self._of(run, "failure") | {"code": code, "message": "m", "origin": self.server, "causes": causes}

    def status(self, **jobs: Any) -> dict[str, Any]:
        return {"v": 1, "t": "status", "server": self.server, "running": [], "unknown": [], "done": []} | jobs

    def grant(self, number: int = 1) -> dict[str, Any]:
        return {"v": 1, "t": "grant", "grant": str(number), "server": self.server, "ttl_s": 2.0}

    def part_reply(self, fetch: dict[str, Any], body: bytes = RESULT) -> dict[str, Any]:
        answer = {"v": 1, "t": "part_reply", "job": fetch["job"], "index": fetch["index"], "parts": self.parts(body)}
        return answer | {"data": body[fetch["index"] * 16 : (fetch["index"] + 1) * 16]}

    def parts(self, body: bytes) -> dict[str, Any]:
        return cut(pack_body(body), 16).model_dump()

    def info(self) -> dict[str, Any]:
        sizes = {"max_concurrent": 1, "max_input_bytes": 1, "max_result_bytes": 1, "num_eval_examples": 2}
        names = {"state": "ready", "env": ENV, "env_id": ENV, "env_args": {}, "fingerprint": "f", "versions": {}}
        return {"v": 1, "t": "info_reply", "server": self.server, "requires_group_rollouts": False} | sizes | names

    def examples(self, total: int = 1, start: int = 0, rows: Any = ({"prompt": []},)) -> dict[str, Any]:
        body = encode({"examples": list(rows)})
        return {"v": 1, "t": "examples_page", "total": total, "start": start, "body": body}

    def _of(self, run: dict[str, Any], kind: str, server: str | None = None) -> dict[str, Any]:
        return {"v": 1, "t": kind, "job": run["job"], "attempt": run["attempt"], "server": server or self.server}


@asynccontextmanager
async def a_fake_server(url: str, prefix: str) -> AsyncIterator[FakeServer]:
    client = await nats.connect(url)
    try:
        fake = FakeServer(client, prefix)
        await fake.open()
        yield fake
    finally:
        await client.close()
