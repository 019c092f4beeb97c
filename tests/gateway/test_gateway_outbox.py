"""What a client that does not read gets later, or costs."""

from __future__ import annotations

from stage import becomes

from envbus.adapters.gateway.outbox import Outbox
from envbus.adapters.gateway.requests import Frames
from envbus.adapters.gateway.router_socket import Sent


class Peer:
    """Takes messages, or says why not."""

    def __init__(self, *, max_bytes: int = 100) -> None:
        self.says = Sent.SENT
        self.got: list[Frames] = []
        self.gone: list[str] = []
        self.outbox = Outbox(self._send, self.gone.append, max_bytes=max_bytes)

    def _send(self, frames: Frames) -> Sent:
        if self.says is Sent.SENT:
            self.got.append(frames)
        return self.says


async def test_what_waits_keeps_its_order() -> None:
    peer = Peer()
    peer.says = Sent.FULL
    for number in range(3):
        peer.outbox.put([b"%d" % number])
    peer.outbox.probe([b"probe"])
    assert not peer.outbox.is_empty
    peer.says = Sent.SENT
    await becomes(lambda: peer.outbox.is_empty)
    peer.outbox.put([b"3"])
    peer.outbox.probe([b"probe"])
    assert peer.got == [[b"0"], [b"1"], [b"2"], [b"3"], [b"probe"]]
    assert not peer.gone


async def test_one_that_leaves_too_much_unread_is_gone() -> None:
    peer = Peer()
    peer.says = Sent.FULL
    peer.outbox.put([b"x" * 60])
    assert not peer.gone
    peer.outbox.put([b"x" * 60])
    assert len(peer.gone) == 1
    assert "120 bytes unread" in peer.gone[0]
    peer.outbox.put([b"y"])
    assert peer.outbox.is_empty


async def test_one_that_is_not_connected_is_gone_once() -> None:
    peer = Peer()
    peer.says = Sent.GONE
    peer.outbox.put([b"x"])
    peer.outbox.put([b"x"])
    assert len(peer.gone) == 1
    assert not peer.got
