"""Does what a reader of the documentation does: writes its files, runs its code and its commands."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from doc_pages import Block

from envbus import NATSEnvServer

NATS_IN_DOCS = "nats://127.0.0.1:4222"
TIMEOUT_S = 200
STOP_S = 45


async def follow(block: Block, folder: Path, namespace: dict[str, Any], nats_url: str) -> None:
    """Do with a block what its mark says."""
    text = block.text.replace(NATS_IN_DOCS, nats_url)
    if block.mark.startswith("file="):
        file = folder / block.mark.removeprefix("file=")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    elif block.mark == "run" and block.language == "python":
        await run_here(block, text, namespace)
    elif block.mark == "run":
        await run_process("sh", "-euc", text, place=block.place)
    elif block.mark == "script":
        await run_process(sys.executable, "-W", "error", "-c", text, place=block.place)


async def run_here(block: Block, text: str, namespace: dict[str, Any]) -> None:
    """Run code as Python's asyncio prompt would: ``await`` is allowed at the top."""
    source = "\n" * (block.line - 1) + text
    code = compile(source, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    async with asyncio.timeout(TIMEOUT_S):
        result = eval(code, namespace)
        if inspect.isawaitable(result):
            await result


async def run_process(*command: str, place: str, environ: dict[str, str] | None = None) -> str:
    """Run a program to its end; its output."""

    def run() -> tuple[int, str]:
        # A file, not a pipe: what a shell left in the background would hold a pipe open.
        with tempfile.TemporaryFile() as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | (environ or {}),
                start_new_session=True,
            )
            try:
                code = process.wait(TIMEOUT_S)
            finally:
                end_group(process)
            file.seek(0)
            return code, file.read().decode()

    code, output = await asyncio.to_thread(run)
    assert code == 0, f"{place}:\n{output}"
    return output


def end_group(leader: subprocess.Popen[bytes]) -> None:
    """Stop a process and what it left in the background, as a user would."""
    deadline = time.monotonic() + STOP_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            leader.poll()
            os.killpg(leader.pid, 0)
            time.sleep(0.02)
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait(STOP_S)


@asynccontextmanager
async def served(env_id: str, address: str) -> AsyncIterator[None]:
    """A server of an env in this process."""
    server = NATSEnvServer(env_id, address=address, allow_urls=["http://127.0.0.1:*"], handle_signals=False)
    running = asyncio.create_task(server.run())
    try:
        yield
    finally:
        await server.close()
        await running
