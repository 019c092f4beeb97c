"""One bound ROUTER socket on the event loop: messages in by a callback, messages out at once or not at all.

It never waits: a send says whether the message went, the client's queue is full, or the client is gone.
Imports pyzmq: import it only where that is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto

import zmq

from envbus.adapters.gateway.limits import GatewayLimits
from envbus.adapters.gateway.requests import Frames
from envbus.errors import UsageError

log = logging.getLogger("envbus.gateway")

BATCH = 100
"""Messages read before other work of the loop gets its turn."""
QUEUE_MESSAGES = 64
"""Per connection and direction, inside ZeroMQ."""
LINGER_MS = 1000
_HEARTBEAT_MS = 10_000
_COPY_BYTES = 2**16


class Sent(Enum):
    """What became of a message."""

    SENT = auto()
    FULL = auto()
    GONE = auto()


class RouterSocket:
    """Bound when made.

    Args:
        context: Whose socket it is.
        address: E.g. ``tcp://127.0.0.1:5000``; port 0 takes a free one.
        on_message: Gets the sender's identity and the frames; called on the loop, must not wait.
        limits: Sizes and times.

    Raises:
        UsageError: The address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_message: Callable[[bytes, Frames], None],
        limits: GatewayLimits,
    ) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Handle | None = None
        self._socket = _bound(context, address, limits)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop.add_reader(self._socket.FD, self._read_soon)
        self._read_soon()

    def send(self, identity: bytes, frames: Frames) -> Sent:
        """Hand a message to ZeroMQ for a client."""
        try:
            is_small = sum(map(len, frames)) < _COPY_BYTES
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=is_small)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                log.warning("a message to a client could not be sent: %s", error)
            return Sent.GONE
        finally:
            # The file descriptor tells of changes once only, and the send may have taken the news of a message.
            self._read_soon()
        return Sent.SENT

    def stop_reading(self) -> None:
        """Take no more messages; they can still be sent."""
        self._loop.remove_reader(self._socket.FD)
        if self._reading is not None:
            self._reading.cancel()
        self._on_message = _ignore

    def close(self) -> None:
        """Close it; what was sent just now still leaves."""
        self.stop_reading()
        self._socket.close(LINGER_MS)

    def _read_soon(self) -> None:
        if self._reading is None and self._on_message is not _ignore:
            self._reading = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading = None
        for _ in range(BATCH):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(identity, frames)
            except Exception:
                log.exception("a client's message could not be handled")
        self._read_soon()


def _bound(context: zmq.Context[zmq.Socket[bytes]], address: str, limits: GatewayLimits) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    options = {
        zmq.ROUTER_MANDATORY: 1,
        zmq.SNDHWM: QUEUE_MESSAGES,
        zmq.RCVHWM: QUEUE_MESSAGES,
        zmq.MAXMSGSIZE: 2 * limits.max_request_bytes,
        zmq.HEARTBEAT_IVL: min(_HEARTBEAT_MS, int(limits.silence_s * 1000)),
        zmq.HEARTBEAT_TIMEOUT: int(limits.silence_s * 1000),
        zmq.IPV6: int("[" in address),
    }
    try:
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise UsageError(f"cannot listen on {address!r}: {error}; write it like tcp://127.0.0.1:5000") from error
    return socket


def _ignore(identity: bytes, frames: Frames) -> None:
    """Where messages go when no more are taken."""
