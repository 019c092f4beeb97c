"""The Operator against a bus with made-up beats and a controller of the test's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from fleet_beats import beat, controller_beat

from envbus.bus.control_messages import EnvReport, Restart, Scale, StopController
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import Failure, Gone, Ok, WireMessage, pack, parse
from envbus.bus.subjects import Subjects, controller
from envbus.bus.subjects import controller_beat as controller_beat_subject
from envbus.controller.operator import Operator
from envbus.controller.targets import find_target
from envbus.errors import BadRequestError, CallTimeoutError, NoServerError, UsageError


class Players:
    """Servers and controllers as messages on a bus, without any process."""

    def __init__(self, client: Any, prefix: str) -> None:
        self.client = client
        self.prefix = prefix
        self.orders: list[tuple[str, WireMessage]] = []

    async def server_beats(self, server: str, env: str = "gsm8k", **fields: Any) -> None:
        await self.client.publish(Subjects(env, self.prefix).beat(server), pack(beat(server, env, **fields)))

    async def controller_beats(self, name: str, replicas: int, **fields: Any) -> None:
        envs = [EnvReport(env="gsm8k", env_id="gsm8k", replicas=replicas, autoscale=fields.pop("autoscale", False))]
        message = controller_beat(name, envs=envs, **fields)
        await self.client.publish(controller_beat_subject(name, self.prefix), pack(message))

    async def play(self, subject: str, name: str, answer: WireMessage | None) -> None:
        async def on_order(message: Any) -> None:
            self.orders.append((name, parse(message.data)))
            if answer is not None:
                await message.respond(pack(answer))

        await self.client.subscribe(subject, cb=on_order)
        # A message to oneself: nats-py's flush() may overtake the subscription.
        echo = await self.client.subscribe(own := self.client.new_inbox())
        await self.client.publish(own, b"")
        await echo.next_msg(timeout=20)

    async def play_controller(self, name: str, answer: WireMessage | None = None) -> None:
        await self.play(controller(name, self.prefix), name, answer or Ok(server=name))


@asynccontextmanager
async def stage(url: str, prefix: str) -> AsyncIterator[tuple[Operator, Players]]:
    client = await nats.connect(url)
    try:
        async with Operator(url, prefix=prefix) as operator:
            await operator.on_bus(lambda bus: bus.round_trip(timeout_s=20))  # NATS knows its subscriptions now
            yield operator, Players(client, prefix)
    finally:
        await client.close()


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_it_hears_servers_controllers_and_ends(nats_url: str, prefix: str) -> None:
    async with stage(nats_url, prefix) as (operator, players):
        await players.client.publish(f"{prefix}.gsm8k.beat.zz", b"no message")
        await players.server_beats("aa", in_flight=3)
        await players.controller_beats("c1", 2)
        await until(lambda: operator.view().server("aa") and operator.view().controllers)
        assert operator.view().totals.in_flight == 3
        await players.client.publish(Subjects("gsm8k", prefix).gone, pack(Gone(server="aa", reason="signal SIGKILL")))
        await until(lambda: operator.view().servers[0].state == "gone")
        assert operator.view().servers[0].problem == "signal SIGKILL"
        foreign = Subjects("mine", prefix)
        await players.client.publish(foreign.beat("bb"), pack(beat("bb", "gsm8k")))
        await players.client.publish(foreign.beat("cc"), pack(beat("dd", "mine")))
        await players.client.publish(controller_beat_subject("c9", prefix), pack(controller_beat("c8")))
        await players.server_beats("ee")
        await until(lambda: operator.view().server("ee"))
        assert {server.server for server in operator.view().servers} == {"aa", "ee"}, "nobody speaks for others"
        assert [each.controller for each in operator.view().controllers] == ["c1"]


async def test_scaling_several_controllers_grows_first(nats_url: str, prefix: str) -> None:
    async with stage(nats_url, prefix) as (operator, players):
        for name, replicas, host in (("c1", 5, "h1"), ("c2", 1, "h2")):
            await players.controller_beats(name, replicas, host=host)
            await players.play_controller(name)
        await until(lambda: len(operator.view().controllers) == 2)
        assert await operator.scale("gsm8k", 5) == {"c1": 3, "c2": 2}
        assert players.orders == [("c2", Scale(env="gsm8k", replicas=2)), ("c1", Scale(env="gsm8k", replicas=3))]
        players.orders.clear()
        assert await operator.scale("gsm8k", 7, host="h2") == {"c2": 7}
        assert await operator.restart("gsm8k", host="h1") == ["c1"]
        assert players.orders == [("c2", Scale(env="gsm8k", replicas=7)), ("c1", Restart(env="gsm8k"))]
        with pytest.raises(UsageError, match="0 or more"):
            await operator.scale("gsm8k", -1)
        with pytest.raises(UsageError, match="one controller runs at most 1000 servers"):
            await operator.scale("gsm8k", 2_001)


async def test_retiring_a_host_tells_its_controllers_and_drains_the_others(nats_url: str, prefix: str) -> None:
    async with stage(nats_url, prefix) as (operator, players):
        await players.server_beats("aa", host="h1", controller="c1")
        await players.server_beats("bb", host="h1")
        await players.server_beats("cc", host="h2")
        await players.controller_beats("c1", 1, host="h1")
        await players.controller_beats("c2", 1, host="h2")
        await until(lambda: len(operator.view().servers) == 3 and len(operator.view().controllers) == 2)
        await players.play_controller("c1")
        await players.play(Subjects("gsm8k", prefix).ctl("bb"), "bb", Ok(server="bb"))
        leaving = await operator.retire(find_target(operator.view(), "h1"))
        assert [server.server for server in leaving] == ["aa", "bb"]
        assert [(name, order.kind) for name, order in players.orders] == [("c1", "scale"), ("bb", "control")]
        players.orders.clear()
        await operator.stop(find_target(operator.view(), "h1"))
        assert players.orders[0] == ("c1", StopController())


async def test_an_env_that_scales_itself_is_not_retired_by_halves(nats_url: str, prefix: str) -> None:
    async with stage(nats_url, prefix) as (operator, players):
        await players.controller_beats("c1", 1)
        await players.controller_beats("c2", 1, autoscale=True)
        for name in ("c1", "c2"):
            await players.play_controller(name)
        await until(lambda: len(operator.view().controllers) == 2)
        with pytest.raises(UsageError, match="scales itself on controller c2"):
            await operator.retire(find_target(operator.view(), "gsm8k"))
        assert players.orders == []


async def test_failures_and_silence_have_names(nats_url: str, prefix: str) -> None:
    async with stage(nats_url, prefix) as (operator, players):
        await players.controller_beats("c1", 1)
        await players.server_beats("aa")
        await players.server_beats("bb")
        await until(lambda: operator.view().controllers and len(operator.view().servers) == 2)
        with pytest.raises(NoServerError, match="controller c1 is not on the bus"):
            await operator.scale("gsm8k", 2)
        await players.play_controller("c1", Failure(code="bad_request", message="no such env"))
        with pytest.raises(BadRequestError, match="no such env"):
            await operator.scale("gsm8k", 2)
        silent, dead = operator.view().servers
        await players.play(Subjects("gsm8k", prefix).ctl("aa"), "aa", None)
        with pytest.raises(CallTimeoutError, match="server aa of env 'gsm8k' gave no answer within"):
            await operator.ping(silent, timeout_s=0.2)
        left = await operator.until_gone([dead], timeout_s=20, progress=lambda servers: None)
        assert left == [], "nobody answers for it: gone at once, not after its silence"


async def test_its_own_outage_is_no_news_of_servers(own_nats: EmbeddedNats, prefix: str) -> None:
    """P24: nobody gets suspect while the bus itself is away."""
    client = await nats.connect(own_nats.url, max_reconnect_attempts=0)
    async with Operator(own_nats.url, prefix=prefix) as operator:
        await operator.on_bus(lambda bus: bus.round_trip(timeout_s=20))
        await Players(client, prefix).server_beats("aa", interval_s=0.5)
        await until(lambda: operator.view().servers)
        await own_nats.kill()
        await until(lambda: operator.view().cut_off)
        later = time.monotonic() + 2  # four of its beats
        assert operator.fleet.view(later).servers[0].state == "ready"
        await own_nats.restart()
        await until(lambda: not operator.view().cut_off, timeout_s=30)
        assert operator.view().servers[0].state == "ready"
    await client.close()
