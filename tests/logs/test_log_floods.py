"""What happens ten thousand times is some lines in the log, with the right number."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_server import FakeServer, Say, a_fake_server
from fuzz_stage import BOUND_S, ENV, a_client, becomes
from log_story import LogFile, happened

from envbus.bus.embedded import EmbeddedNats

LATE, BAD = 10_000, 2_000


async def test_a_flood_of_late_results_and_bad_replies(nats_url: str, prefix: str, own_log: LogFile) -> None:
    """P12, P60: a server that lost a job, and goes on telling its result when another has delivered."""
    runs: list[dict[str, Any]] = []

    async def on_run(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        runs.append(run)
        await say(fake.accepted(run))
        if len(runs) == 1:
            for _ in range(BAD):
                await say(b"\x00 no message")
        else:
            await say(fake.result(run))
            for _ in range(LATE):
                await say(fake.result(run))

    async def on_check(fake: FakeServer, check: dict[str, Any], say: Say) -> None:
        await say(fake.status(unknown=check["jobs"] if len(runs) == 1 else []))

    async with a_fake_server(nats_url, prefix) as fake, a_client(nats_url, prefix) as client:
        fake.scripts.update(run=on_run, check=on_check)
        await asyncio.wait_for(client.run_rollout({"prompt": [], "example_id": 1}, None, "m"), BOUND_S)  # type: ignore[typeddict-item]
        await becomes(lambda: client.stats()["late_results"] == LATE, what=lambda: str(client.stats()))
        stats = client.stats()
    assert (stats["jobs"], stats["resent"], stats["bad_messages"]) == (1, 1, BAD)
    for text, count in (("a late result was dropped", LATE), ("a reply was dropped", BAD)):
        lines = own_log.lines(text)
        assert happened(lines) == count
        assert 2 <= len(lines) <= 6, "one per window"
        assert {line["level"] for line in lines} == {"WARNING"}
    assert own_log.lines("client ")[0]["message"].endswith("10,000 late results dropped, 2,000 bad messages dropped")


async def test_an_outage_is_logged_once_with_its_length(own_nats: EmbeddedNats, prefix: str, own_log: LogFile) -> None:
    """P10: whatever the number of tries to connect again."""
    async with a_client(own_nats.url, prefix) as client:
        await own_nats.kill()
        await becomes(lambda: bool(own_log.lines(f"NATS at {own_nats.url}: connection lost")), what=lambda: "lost")
        await own_nats.restart()
        await becomes(lambda: client.stats()["outage_s"] > 0, what=lambda: str(client.stats()))
    (back,) = own_log.lines(f"NATS at {own_nats.url}: connected again after ")
    assert back["outage_s"] > 0
    assert back["reconnects"] == 1
    assert len(own_log.lines(f"NATS at {own_nats.url}: connection lost")) == 1
    (summary,) = own_log.lines("client ")
    assert "1 reconnect (" in summary["message"] or "1 connection made anew (" in summary["message"]
    assert summary["env"] == ENV
