"""On a real nats-server every role may do what the product does in it, and nothing that others do."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from shared_nats import WAIT_S, Share

from envbus.controller.operator import Operator
from envbus.controller.permission_probes import is_allowed, needs

IDS = ["one account", "accounts"]
SERVER = {
    "subscribe env.math.rollout workers",
    "subscribe env.math.info workers",
    "subscribe env.math.examples workers",
    "subscribe env.math.wait",
    "subscribe env.math.server.5e",
    "subscribe env.math.ctl.5e",
    "subscribe env.math.ctl.all",
    "subscribe $SRV.PING",
    "subscribe $SRV.STATS.math.5e",
    "publish env.math.beat.5e",
}
CALLS = {
    "publish env.math.rollout",
    "publish env.math.examples",
    "publish env.math.wait",
    "publish env.math.server.5e",
}
ASKS = {"publish env.math.info"}
GONE_OF_ONE = {"subscribe env.math.gone"}
BEATS = {"subscribe env.*.beat.*", "subscribe env.math.beat.*", "subscribe envctl.beat.*"}
NEWS = {*GONE_OF_ONE, *BEATS, "subscribe env.*.gone"}
ORDERS = {"publish env.math.ctl.5e", "publish env.math.ctl.all"}
OPERATOR = {"publish envctl.ctl1", "publish envctl.other", "publish $SRV.PING"}
CONTROLLER = {"subscribe envctl.ctl1", "publish envctl.ctl1", "publish envctl.beat.ctl1", "publish env.math.gone"}
ANSWERS = {"publish _INBOX_ops.x", "publish _INBOX_ctl1.x", "publish _INBOX_alice.x"}
INBOXES = {"subscribe _INBOX_alice.>", "subscribe _INBOX_ops.>", "publish _INBOX_gpu1.x", "publish _INBOX_wall.x"}
"""Of others; each has its own beside."""
MAPPED = "publish _R_.x"
"""Replies to other accounts."""
NOBODYS = {
    "subscribe env.math.rollout",
    "subscribe env.math.info",
    "subscribe env.math.examples",
    "subscribe env.math.rollout other-queue",
    "subscribe env.>",
    "subscribe >",
    "subscribe _INBOX.>",
    "subscribe _INBOX_carol.>",
    "publish _INBOX_carol.x",
    "publish envctl.beat.other",
    "subscribe envctl.other",
    "subscribe $SYS.>",
    "publish $SYS.REQ.SERVER.PING",
    "publish $JS.API.INFO",
    MAPPED,
}
EVERYTHING = SERVER | CALLS | ASKS | NEWS | ORDERS | OPERATOR | CONTROLLER | NOBODYS | ANSWERS | INBOXES
ROLES = {
    "gpu1": SERVER,
    "alice": CALLS | ASKS | NEWS,
    "shy": CALLS | ASKS | GONE_OF_ONE | {"subscribe env.*.gone"},
    "ops": ORDERS | OPERATOR | ASKS | NEWS,
    "caller": ORDERS | OPERATOR | ASKS | NEWS | CALLS,
    "ctl1": ORDERS | CONTROLLER | BEATS,
    "wall": NEWS,
    "mathserver": SERVER,
    "artist": set(),
    "artserver": {"subscribe $SRV.PING", "subscribe $SRV.STATS.math.5e"},
}
"""Users, and what they may do of EVERYTHING."""
DETAILS = {
    "shy": {"beats": False},
    "caller": {"calls": True},
    "mathserver": {"envs": ["math"]},
    "artserver": {"envs": ["art"]},
    "artist": {"envs": ["art"], "beats": False},
}


@pytest.mark.parametrize("accounts", [False, True], ids=IDS)
async def test_each_role_may_do_what_it_needs_and_no_more(share: Share, accounts: bool) -> None:
    """DESIGN 3: a client publishes requests and hears its inbox; servers take work in their queue group only."""
    users = {
        "trainers": ["alice", "shy", "artist"],
        "servers": ["gpu1", "mathserver", "artserver"],
        "operators": ["ops", "caller"],
    }
    async with share(tls=False, accounts=accounts, user=DETAILS, **users) as shared:
        for user, allowed in ROLES.items():
            async with shared.connected(user) as wire:
                for right in sorted(EVERYTHING):
                    action, _, subject = right.partition(" ")
                    denied = await wire.is_denied(action, subject)
                    its_own = f"_INBOX_{user}." in subject
                    assert denied == (right not in allowed | answers(user, accounts) and not its_own), (
                        f"{user}: {right}"
                    )


def answers(user: str, accounts: bool) -> set[str]:
    """Where a user may answer: those who ask it, in another account by what NATS makes of their inboxes."""
    if user == "ctl1":
        return {"publish _INBOX_ops.x"}
    if ROLES[user] >= {"subscribe $SRV.PING"}:
        return ANSWERS - {"publish _INBOX_alice.x"} | {MAPPED} if accounts else ANSWERS
    return set()


@pytest.mark.parametrize("accounts", [False, True], ids=IDS)
async def test_doctor_finds_each_user_fit_for_its_role(share: Share, accounts: bool) -> None:
    """Over TLS, with the contexts that were written."""
    roles = {"alice": "trainer", "gpu1": "server", "ops": "operator", "ctl1": "controller", "wall": "dashboard"}
    async with share(accounts=accounts) as shared:
        for user, role in roles.items():
            async with Operator(shared.options(user)) as operator:
                for need in needs("math", "env", controller_id="ctl1"):
                    if need.role == role:
                        assert await operator.on_bus(partial(is_allowed, need=need)), need


async def test_another_prefix_and_another_id(share: Share) -> None:
    async with share(tls=False, prefix="team.rl", user={"ctl1": {"controller_id": "host7"}}) as shared:
        async with shared.connected("alice") as wire:
            assert not await wire.is_denied("publish", "team.rl.math.rollout")
            assert await wire.is_denied("publish", "env.math.rollout")
        async with shared.connected("ctl1") as wire:
            assert not await wire.is_denied("publish", "team.rlctl.beat.host7")
            assert await wire.is_denied("publish", "team.rlctl.beat.ctl1")


@pytest.mark.parametrize("accounts", [False, True], ids=IDS)
async def test_a_request_may_be_answered_many_times(share: Share, accounts: bool) -> None:
    """Accepted, progress, the result."""
    async with (
        share(tls=False, accounts=accounts) as shared,
        shared.connected("gpu1") as server,
        shared.connected("alice") as alice,
    ):
        requests: asyncio.Queue[str] = asyncio.Queue()
        answers: asyncio.Queue[bytes] = asyncio.Queue()

        async def on_request(message: Any) -> None:
            await requests.put(message.reply)

        async def on_answer(message: Any) -> None:
            await answers.put(message.data)

        await server.client.subscribe("env.math.rollout", queue="workers", cb=on_request)
        await alice.client.subscribe("_INBOX_alice.job", cb=on_answer)
        await server.judged()
        await alice.client.publish("env.math.rollout", b"run", reply="_INBOX_alice.job")
        reply = await asyncio.wait_for(requests.get(), WAIT_S)
        for number in range(20):
            await server.client.publish(reply, b"%d" % number)
        assert await server.judged() == []
        heard = [await asyncio.wait_for(answers.get(), WAIT_S) for _ in range(20)]
        assert heard == [b"%d" % number for number in range(20)]
