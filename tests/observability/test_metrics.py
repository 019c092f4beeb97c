"""The metrics of a server and of a fleet: what Prometheus makes of them."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from test_beat_extras import QUICK, beats_until
from web import get

from envbus import NATSEnvServer
from envbus.bus.address import resolve_bus_options
from envbus.bus.bus import Bus
from envbus.bus.control_messages import ControllerBeat, EnvReport, ProcessReport
from envbus.bus.messages import DURATION_BOUNDS_S, Beat
from envbus.controller.pages import FleetPages
from envbus.server.metrics import controller_metrics, metrics_page, server_metrics

UNITS = ("seconds", "bytes")
Serve = Callable[..., AbstractAsyncContextManager[NATSEnvServer]]


def beat(server: str = "s1", **fields: Any) -> Beat:
    counts = {name: 0 for name in Beat.model_fields if Beat.model_fields[name].annotation is int}
    floats = {"loop_lag_s": 0.002, "oldest_job_s": 0.0, "started_at": 1.5, "interval_s": 1.0}
    known = counts | floats | {"server": server, "env": "e", "state": "ready", "host": "h", "env_id": "e"}
    return Beat(**(known | {"fingerprint": "f", "versions": {"envbus": "1", "env": "2"}} | fields))


FLEET = [
    beat(done=3, failed=2, slots=4, failed_by_type={"KeyError": 2}, duration_counts=[0, 2, 1, *[0] * 11, 2],
         duration_sum_s=7200.5),
    beat("s2", env='odd "name"\n\\ \ud800', state="draining", jobs=5, retried=1, sent_bytes=10),
]  # fmt: skip
CONTROLLERS = [
    ControllerBeat(
        controller="c", host="h", pid=1, version="1", started_at=1.0,
        envs=[EnvReport(env="e", env_id="e", replicas=2, failed="it broke")],
        processes=[ProcessReport(server="s1", env="e", slot=0, generation=1, pid=3, state="running", restarts=4)],
    )
]  # fmt: skip


def page(accept: str = "") -> str:
    body, _ = metrics_page(lambda: [*server_metrics(FLEET), *controller_metrics(CONTROLLERS)], accept=accept)
    return body.decode()


def sample(text: str, name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found[0]


def test_promtool_has_nothing_to_say(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "metrics"], input=page(), capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_names_follow_the_conventions() -> None:
    """Runs everywhere: counters end in _total, units are base units and come last, each metric has a help text."""
    for family in text_string_to_metric_families(page()):
        assert family.name.startswith("envbus_")
        assert family.documentation.endswith(".")
        words = family.name.split("_")
        assert not set(words) & {"ms", "s", "kb", "mb", "count"}
        assert all(unit not in words[:-1] for unit in UNITS)
        if family.type == "counter":
            assert all(each.name.endswith("_total") for each in family.samples)


def test_values_are_those_of_the_beats() -> None:
    text = page()
    assert sample(text, "envbus_server_rollouts_total", server="s1", outcome="failed") == 2
    assert sample(text, "envbus_server_rollout_errors_total", type="KeyError") == 2
    assert sample(text, "envbus_server_slots", server="s1") == 4
    assert sample(text, "envbus_server_jobs_retried_total", server="s2") == 1
    assert sample(text, "envbus_server_state", server="s2", state="draining") == 1
    assert sample(text, "envbus_server_state", server="s2", state="ready") == 0
    assert sample(text, "envbus_controller_restarts_total", controller="c", env="e", place="0") == 4
    assert sample(text, "envbus_controller_replicas", controller="c", env="e") == 2
    assert sample(text, "envbus_controller_env_failed", env="e") == 1


def test_the_histogram_is_cumulative() -> None:
    name = "envbus_server_rollout_duration_seconds"
    text = page()
    counts = [sample(text, f"{name}_bucket", server="s1", le=str(bound)) for bound in DURATION_BOUNDS_S]
    assert counts == [0, 2, *[3] * 12]
    assert sample(text, f"{name}_bucket", server="s1", le="+Inf") == 5
    assert sample(text, f"{name}_count", server="s1") == 5
    assert sample(text, f"{name}_sum", server="s1") == 7200.5


def test_openmetrics_is_spoken_where_it_is_asked_for() -> None:
    text = page("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert {family.name for family in openmetrics.text_string_to_metric_families(text)}


def test_an_empty_fleet_is_a_page(promtool: str) -> None:
    body, content_type = metrics_page(lambda: server_metrics([]))
    assert body.startswith(b"# HELP envbus_server_slots")
    assert content_type.startswith("text/plain")


async def test_a_controller_exposes_the_whole_fleet(serve: Serve, nats_url: str, prefix: str) -> None:
    bus = Bus.acquire(resolve_bus_options(nats_url))
    pages = FleetPages(bus.connection, prefix)
    async with serve(settings=QUICK) as one, serve(settings=QUICK) as other:
        try:
            await opened(bus, pages)
            await beats_until(nats_url, prefix, lambda beats: len({each.server for each in beats}) == 2)
            assert (await get(pages.port, "/readyz")).status == 200
            text = (await get(pages.port, "/metrics")).body
            assert sample(text, "envbus_server_slots", server=one.server_id) == 64
            assert sample(text, "envbus_server_slots", server=other.server_id) == 64
        finally:
            await bus.thread.run(pages.close())
            await asyncio.to_thread(bus.release)


async def opened(bus: Bus, pages: FleetPages) -> None:
    await asyncio.wrap_future(bus.open(timeout_s=20))
    await bus.thread.run(pages.open(0, host="127.0.0.1"))


@pytest.mark.parametrize("reason", ["draining", None])
async def test_a_controller_that_drains_is_not_ready(nats_url: str, prefix: str, reason: str | None) -> None:
    bus = Bus.acquire(resolve_bus_options(nats_url))
    pages = FleetPages(bus.connection, prefix, not_ready=lambda: reason)
    try:
        await opened(bus, pages)
        answer = await get(pages.port, "/readyz")
        assert (answer.status, answer.body) == ((503, "draining\n") if reason else (200, "ok\n"))
    finally:
        await bus.thread.run(pages.close())
        await asyncio.to_thread(bus.release)
