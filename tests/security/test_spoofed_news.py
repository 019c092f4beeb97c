"""News that is no lie of a stranger, but of a user who may speak: a server of one env about another env, a controller
about the servers of another one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from attacked_bus import ENV, ITS, AttackedBus, becomes, generated

from envbus.bus.messages import Beat, Gone, pack
from envbus.bus.subjects import Subjects
from envbus.client import presence
from envbus.client.checks import Checks
from envbus.controller import hearing
from envbus.controller.operator import Operator

sys.path.insert(0, str(Path(__file__).parent.parent / "operators"))

from fleet_beats import beat

MATHS = Subjects("math")


async def is_believed(bus: AttackedBus) -> bool:
    """A server that serves ``math`` beats as one of ENV that is broken; whether an operator or a trainer sees that."""
    lie: Beat = beat("forged", ENV, state="failed", error="gone for ever")
    truth: Beat = beat("s1", "math")
    async with bus.wire("mathsrv") as mathsrv, Operator(bus.options("op")) as operator, bus.client("bob") as bob:
        asking = asyncio.create_task(bob.servers())
        await operator.check_allowed()
        while not asking.done():
            mathsrv.publish(MATHS.beat("forged"), pack(lie))
            mathsrv.publish(MATHS.beat("s1"), pack(truth))
            await mathsrv.settle()
            await asyncio.sleep(0.02)
        await becomes(lambda: operator.view().server("s1") is not None)
        seen = [operator.view().server("forged") is not None, bool(await asking)]
        assert seen in ([True, True], [False, False])
        return all(seen)


async def test_a_heartbeat_of_another_env(mode: str, shared_bus: AttackedBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """NATS lets it speak on its own env's subject; that counts for its own env only."""
    await shared_bus.use(generated(mode))
    monkeypatch.setattr(presence.hear_beats, "__kwdefaults__", {"listen_s": 0.3})
    assert not await is_believed(shared_bus)
    for module, names in ((presence, ("forged",)), (hearing, ("forged", "s1"))):
        said = {f"env.math.beat.{name}": (ENV if name == "forged" else "math", name) for name in names}
        monkeypatch.setattr(module, "parse_beat", lambda subject, prefix, said=said: said.get(subject))
    assert await is_believed(shared_bus)


async def is_sent_again(bus: AttackedBus, asked: list[str]) -> bool:
    """A controller says that a server is gone which is not its own, and lives; whether its jobs are sent elsewhere."""
    async with bus.serving() as served, bus.client("bob") as bob, bus.wire("ctl2") as ctl2:
        item: Any = {"prompt": [], "example_id": 1, "hold": True}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bob.run_rollout(item, None, "m"))
            await becomes(lambda: bool(served.env.started))
            session = bob._session
            assert session is not None
            await becomes(lambda: bool(session._attempts.servers()))
            ctl2.publish(ITS.gone, pack(Gone(server=served.server.server_id)))
            await ctl2.settle()
            await becomes(lambda: bool(asked))
            served.env.let_go.set()
        return session.counts["resent"] > 0


@pytest.mark.parametrize("asks", [True, False])
async def test_the_end_of_a_server_that_lives(
    mode: str, shared_bus: AttackedBus, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """A client asks the server itself; one that believed the news would send its jobs again."""
    await shared_bus.use(generated(mode))
    asked: list[str] = []
    check_ended = Checks._check_ended

    async def check(checks: Checks, server: str, job: str) -> None:
        if asks:
            await check_ended(checks, server, job)
        else:
            checks._on_nobody(server)
        asked.append(server)

    monkeypatch.setattr(Checks, "_check_ended", check)
    assert await is_sent_again(shared_bus, asked) is not asks
