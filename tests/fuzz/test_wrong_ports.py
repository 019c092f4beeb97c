"""Something else on the NATS port: client and command line fail within bounds, with address and reason (P58)."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time

import pytest
from fuzz_stage import ENV
from tcp_server import Handler, tcp_server

from envbus import ClientSettings, NATSEnvClient
from envbus.errors import BusUnreachableError

INFO = b'INFO {"server_id":"x","version":"2.10.0","proto":1,"headers":true,"max_payload":1048576'
BOUND_S = 30.0


def says(text: bytes, *, closes: bool = False) -> Handler:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        if not closes:
            await reader.read()

    return behave


def replies(text: bytes) -> Handler:
    """As servers that wait to be asked: HTTP, Redis, TLS (an alert)."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(text)

    return behave


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 65_536)
        await writer.drain()


async def floods_after_info(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(INFO + b"}\r\n")
    await floods(reader, writer)


OTHERS: dict[str, Handler] = {
    "silent": says(b""),
    "closes at once": says(b"", closes=True),
    "garbage": says(bytes(range(256)) * 4),
    "garbage lines": says(b"\xff\xfe\r\n" * 100),
    "endless": floods,
    "SSH": says(b"SSH-2.0-OpenSSH_9.2p1\r\n"),
    "SMTP": says(b"220 mail ESMTP\r\n"),
    "HTTP": replies(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    "Redis": replies(b"-ERR unknown command\r\n"),
    "TLS": replies(b"\x15\x03\x01\x00\x02\x02\x46"),
    "INFO and closes": says(INFO + b"}\r\n", closes=True),
    "INFO and silence": says(INFO + b"}\r\n"),
    "INFO and no end": says(INFO),
    "INFO and flood": floods_after_info,
    "INFO without JSON": says(b"INFO hello\r\n"),
    "INFO of a list": says(b"INFO []\r\n"),
    "INFO of wrong types": says(b'INFO {"max_payload":"x","connect_urls":5,"nonce":[]}\r\n'),
    "TLS is required": says(INFO + b',"tls_required":true}\r\n'),
    "only errors": says(INFO + b"}\r\n-ERR 'no'\r\n"),
}


@pytest.mark.parametrize("name", OTHERS)
async def test_what_is_no_nats_is_refused_with_address_and_reason(name: str) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with tcp_server(OTHERS[name]) as port:
        where = f"127.0.0.1:{port}"
        started = time.monotonic()
        client = NATSEnvClient(f"nats://{where}", ENV, settings=ClientSettings(connect_timeout_s=0.5))
        try:
            with pytest.raises(BusUnreachableError) as caught:
                await asyncio.wait_for(client.connect(), BOUND_S)
        finally:
            await client.close()
        assert time.monotonic() - started < BOUND_S
    text = str(caught.value)
    assert where in text
    assert len(text.replace(where, "")) > len("nats://: "), "a reason is given"
    assert len(text) < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 * 1024


async def test_the_command_line_says_so_too() -> None:
    """Exit code 2 and one line, for a port that is silent."""
    async with tcp_server(OTHERS["silent"]) as port:
        where = f"127.0.0.1:{port}"
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "envbus", "ls", "--address", f"nats://{where}"],
            env={**os.environ, "ENVBUS_CLIENT_CONNECT_TIMEOUT_S": "0.5"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "WARNING" not in line] == [
        f"error[bus_unreachable]: {where}: something answers there, but it is not NATS; check the port, or "
        "tls_first in the context: NATS is silent before TLS if set up so"
    ]
