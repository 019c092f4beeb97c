"""DEALER sockets that speak both protocols by hand, and what a client makes of deltas."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from stage import Stage

from envbus import ClientSettings
from envbus.adapters.gateway.gateway import Gateway

TIMEOUT_S = 60.0
SETTINGS = {"check_interval_s": 0.2, "accept_timeout_s": 0.5, "wait_repeat_s": 0.3, "close_timeout_s": 1.0}


def gateway(stage: Stage, *, listeners: int = 1, **options: Any) -> Gateway:
    """A gateway to a stage on free ports; not entered yet."""
    settings = ClientSettings(**(SETTINGS | options.pop("settings", {})))
    places = [("tcp://127.0.0.1:*", stage.name or "")] * listeners
    return Gateway(places, stage.url, prefix=stage.prefix, settings=settings, **options)


def new_id() -> bytes:
    return secrets.token_hex(16).encode()


def pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def classic_body(*items: Any, **fields: Any) -> bytes:
    """A request of the classic protocol: a rollout of one item, a group of more."""
    inputs = {"request_type": "run_rollout", "input": items[0]}
    if len(items) > 1:
        inputs = {"request_type": "run_group", "group_inputs": list(items)}
    rest = {"client_config": {}, "model": "m", "sampling_args": {}, "max_retries": 0, "state_columns": None}
    return pack(inputs | rest | fields)


def task_body(**task: Any) -> bytes:
    """A run of the new protocol."""
    return pack({"task_data": task, "client": {"type": "eval"}, "model": "m", "sampling": {}})


class Dealer:
    """One client: keeps apart what comes for each request."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self._others: list[list[bytes]] = []

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_multipart(list(frames))

    async def receive(self) -> list[bytes]:
        """The next message that is no probe."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                frames: list[bytes] = await self.socket.recv_multipart()
                if frames[0] != b"envbus-probe":
                    return frames

    async def answer(self, request_id: bytes) -> dict[str, Any]:
        """The map of the last frame of the next message to one request; others are kept."""
        return unpack((await self.message(request_id))[-1])

    async def message(self, request_id: bytes) -> list[bytes]:
        for frames in self._others:
            if frames[0] == request_id:
                self._others.remove(frames)
                return frames
        while (frames := await self.receive())[0] != request_id:
            self._others.append(frames)
        return frames

    async def rollout(self, *items: Any, **fields: Any) -> dict[str, Any]:
        request_id = new_id()
        await self.send(request_id, classic_body(*items, **fields))
        return await self.answer(request_id)

    async def episode(self, request_id: bytes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """All deltas of a run, and its reply."""
        deltas = []
        while True:
            _, kind, data = await self.message(request_id)
            if kind == b"reply":
                return deltas, unpack(data)
            deltas.append(unpack(data))


class Dealers:
    """Makes clients in one context."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []

    def connect(self, gateway: Gateway, number: int = 0) -> Dealer:
        socket = self._context.socket(zmq.DEALER)
        self._sockets.append(socket)
        socket.connect(gateway.listeners[number].address)
        return Dealer(socket)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(0)
        self._context.term()


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def assembled(deltas: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The traces that a client has in the end, by id: the nodes of each."""
    traces: dict[str, list[Any]] = {}
    for delta in deltas:
        if delta.get("discard"):
            del traces[delta["trace"]]
            continue
        if "open" in delta:
            assert delta["trace"] not in traces
            traces[delta["trace"]] = []
        traces[delta["trace"]] += delta["nodes"]
    return traces
