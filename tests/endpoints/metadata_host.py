"""Run in a network namespace of its own: a metadata service listens there, and model clients are made to call it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from typing import Any

from listening import Listener

from envbus.environments.model_call import chat
from envbus.environments.model_client import close_clients, resolve_client
from envbus.errors import EnvbusError, ModelAddressError
from envbus.types import ClientConfig

ADDRESS = "169.254.169.254"
_resolve = socket.getaddrinfo
answers: list[str] = []


def resolve(host: Any, *arguments: Any, **settings: Any) -> Any:
    """A name server that gives out one address, and then another one."""
    return _resolve(answers.pop(0) if host == "model.example" else host, *arguments, **settings)


async def call(base_url: str) -> BaseException | None:
    try:
        await chat(resolve_client(ClientConfig(api_base_url=base_url, api_key_var=None, max_retries=1)), "m", [])
    except EnvbusError as error:
        return error
    return None


def become_one() -> None:
    for command in ("link set lo up", f"address add {ADDRESS}/32 dev lo"):
        subprocess.run(["ip", *command.split()], check=True)
    socket.getaddrinfo = resolve


async def main() -> None:
    with Listener(ADDRESS).listening() as metadata:
        answers.extend([ADDRESS, "127.0.0.1", "127.0.0.1", ADDRESS])
        for host in (ADDRESS, f"[::ffff:{ADDRESS}]", "model.example"):
            error = await call(f"http://{host}:{metadata.port}/v1")
            assert isinstance(error, ModelAddressError), repr(error)
        error = await call(f"http://model.example:{metadata.port}/v1")
        assert error is not None
        assert "could not be reached after 2 tries" in str(error), "the name is innocent at first"
        error = await call(f"http://model.example:{metadata.port}/v1")
        assert isinstance(error, ModelAddressError), "and then it is not"
        await close_clients()
        assert metadata.heard == []
        with socket.create_connection((ADDRESS, metadata.port), timeout=30) as connection:
            connection.sendall(b"hello")
            assert connection.recv(1) == b"", "read, and closed"
    assert metadata.heard, "it would have been heard"
    print("nobody called")


become_one()
asyncio.run(main())
