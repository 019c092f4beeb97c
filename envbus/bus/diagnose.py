"""Why a NATS address cannot be reached, in words that say what to change."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from urllib.parse import urlsplit

from envbus.bus.address import BusOptions

_LOOK_S = 1.5
_NOT_ACCEPTED = "CERTIFICATE_VERIFY_FAILED"
_ENDED_IN_TLS = ("[SSL", "Broken pipe", "reset by peer")
"""How a connection ends that NATS refuses when TLS is set up: with TLS 1.3 it may be after the handshake."""


async def explain_unreachable(options: BusOptions, error: str) -> str:
    """Return one sentence per server of what is there instead of NATS.

    Args:
        options: The address that failed.
        error: What the NATS client said.
    """
    if _NOT_ACCEPTED in error:
        return (
            f"{options.describe()}: the certificate of NATS is not accepted: {error}; it must be valid, for this name, "
            "and of the authority that ca in the context names"
        )
    if options.requires_tls and any(sign in error for sign in _ENDED_IN_TLS):
        wants = "; it may want a certificate of this user: cert and key in the context"
        if options.tls_cert_file:
            wants = "; NATS did not take this user's certificate" if "CERT" in error or "UNKNOWN_CA" in error else ""
        return f"{options.describe()}: {error}{wants}"
    findings = [
        await _look(urlsplit(server).hostname or "", urlsplit(server).port or 4222) for server in options.servers
    ]
    return "; ".join(finding or f"{options.describe()}: {error}" for finding in findings)


async def _look(host: str, port: int) -> str | None:
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(_LOOK_S):
            reader, writer = await asyncio.open_connection(host, port)
    except socket.gaierror:
        return f"{where}: the host name does not resolve; check the address"
    except ConnectionRefusedError:
        return f"{where}: connection refused, no NATS server listens there; start one or check the address"
    except TimeoutError:
        return f"{where}: no answer within {_LOOK_S:g} s; check the address and the network"
    except OSError as error:
        return f"{where}: {error.strerror or error}"
    try:
        return await _greeting(where, reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _greeting(where: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
    """NATS speaks first; others wait to be asked."""
    not_nats = f"{where}: something answers there, but it is not NATS; check the port"
    try:
        async with asyncio.timeout(_LOOK_S):
            first = await reader.read(5)
            return None if first.startswith(b"INFO ") else not_nats
    except TimeoutError:
        return f"{not_nats}, or tls_first in the context: NATS is silent before TLS if set up so"
    except OSError:
        return not_nats
