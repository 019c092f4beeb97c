"""``envbus health``, which containers' health checks run: 0 or 1 by a page's answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from envbus.cli.health_command import health
from envbus.errors import UsageError
from envbus.http_endpoint import Response, start_http_endpoint


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A process that lives and is not ready."""
    routes = {"/livez": lambda request: Response(b"ok\n"), "/readyz": lambda request: Response(b"draining\n", 503)}
    endpoint = await start_http_endpoint(0, routes, host="127.0.0.1")
    yield f"http://127.0.0.1:{endpoint.port}"
    await endpoint.close()


async def test_a_page_decides_the_exit_code(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(health, f"{url}/livez") == 0
    assert capsys.readouterr() == ("", "")
    assert await asyncio.to_thread(health, f"{url}/readyz") == 1
    assert capsys.readouterr().err == "error[503]: draining\n"
    assert await asyncio.to_thread(health, f"{url}/health") == 1
    assert "error[404]" in capsys.readouterr().err


async def test_it_asks_this_host_and_no_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert await asyncio.to_thread(health, f"{url}/livez") == 0


def test_no_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        assert health(f"http://127.0.0.1:{bound.getsockname()[1]}/livez") == 1
    assert "Connection refused" in capsys.readouterr().err
    with pytest.raises(UsageError, match="begins with http://"):
        health("file:///etc/passwd")
