"""Drives a real headless Chromium over its debugging pipe: two file descriptors, no port, no further package."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
ANSWER_S = 20.0
LIMIT_BYTES = 64 * 1024 * 1024


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """One browser with one page, and what the page wrote to its console."""

    def __init__(self, profile: Path, *, width: int = 1920, height: int = 1080) -> None:
        self._profile = profile
        self._size = (width, height)
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self.complaints: list[str] = []

    async def __aenter__(self) -> Self:
        to_read, to_write = _pipe()
        from_read, from_write = _pipe()
        program = find_chromium()
        assert program is not None
        arguments = [program, *FLAGS.split(), f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            ["/bin/bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash", *arguments],
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(from_write)
        self._out = open(to_write, "wb", buffering=0)  # noqa: SIM115, ASYNC230 - closed at the end
        reader = asyncio.StreamReader(limit=LIMIT_BYTES)
        self._in, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader),
            open(from_read, "rb", buffering=0),  # noqa: SIM115, ASYNC230
        )
        self._listening = asyncio.create_task(self._listen(reader))
        try:
            await self._attach()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _attach(self) -> None:
        targets = (await self.send("Target.getTargets"))["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = await self.send("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        width, height = self._size
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def __aexit__(self, *exc: object) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._out.close()
        self._in.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait, 10)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = json.loads((await reader.readuntil(b"\0"))[:-1])
            answer = self._answers.pop(message.get("id", 0), None)
            if answer is not None and not answer.done():
                answer.set_result(message)
            elif message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])

    async def send(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        answer = await asyncio.wait_for(self._answers[number], ANSWER_S)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}", what="a page")

    async def evaluate(self, expression: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(
        self, expression: str, holds: Callable[[Any], bool] = bool, *, timeout_s: float = 15.0, what: str = ""
    ) -> Any:
        """Wait until an expression's value fulfils a condition; returns it."""
        value: Any = None
        try:
            async with asyncio.timeout(timeout_s):
                while not holds(value := await self.evaluate(expression)):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s} s: {what or expression}; last: {value!r}") from None
        return value

    async def screenshot(self, file: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are clear of 3 and 4, which the browser gets."""
    ends = os.pipe()
    clear = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return clear[0], clear[1]
