"""Prometheus metrics, made from heartbeats: of one server by itself, of a whole fleet by a controller.

Both come from the same function, so a server's own page and the fleet's page
have the same metrics. Nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from envbus.bus.control_messages import ControllerBeat
from envbus.bus.messages import DURATION_BOUNDS_S, Beat

_SERVER = ("env", "server")
_STATES = get_args(Beat.model_fields["state"].annotation)
_GAUGES: tuple[tuple[str, str, Callable[[Beat], float]], ...] = (
    ("slots", "Rollouts that the server runs at the same time at most.", lambda b: b.slots),
    ("in_flight", "Rollouts that run now.", lambda b: b.in_flight),
    ("waiting_clients", "Clients in the server's waiting line.", lambda b: b.waiting_clients),
    ("waiting_jobs", "Jobs that waiting clients said they have; each waits at every server.", lambda b: b.waiting_jobs),
    ("held_results", "Results that wait to be collected.", lambda b: b.held_results),
    ("held_result_bytes", "Memory of results that wait to be collected.", lambda b: b.held_bytes),
    ("short_of_memory", "1 while no work is taken for want of memory, else 0.", lambda b: b.short_of_memory),
    ("loop_lag_seconds", "How long the environment's event loop takes to answer.", lambda b: b.loop_lag_s),
    ("oldest_job_seconds", "Age of the oldest job that has not ended.", lambda b: b.oldest_job_s),
    ("resident_memory_bytes", "Resident memory of the server's process.", lambda b: b.rss_bytes),
    ("start_time_seconds", "When the server started, in seconds since the epoch.", lambda b: b.started_at),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Beat], float]], ...] = (
    ("jobs", "Jobs taken; a group is one job.", lambda b: b.jobs),
    ("jobs_retried", "Jobs taken whose attempt on another server was lost or stalled.", lambda b: b.retried),
    ("jobs_repeated", "Jobs that a client sent again while they were here already.", lambda b: b.repeated),
    ("jobs_orphaned", "Jobs dropped because their client was gone.", lambda b: b.orphaned),
    ("results_lost", "Held results that nobody collected in time.", lambda b: b.lost_results),
    ("results_unconfirmed", "Results let go that were sent but never confirmed.", lambda b: b.unconfirmed_results),
    ("busy_answers", "Jobs turned away because no slot was free.", lambda b: b.busy),
    ("received_bytes", "Bytes of inputs as they travelled.", lambda b: b.received_bytes),
    ("sent_bytes", "Bytes of results and progress as they travelled.", lambda b: b.sent_bytes),
)


def server_metrics(beats: Sequence[Beat]) -> Iterator[Metric]:
    """Make the metrics of servers from their latest heartbeats."""
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(f"envbus_server_{name}", text, labels=_SERVER)
        for beat in beats:
            gauge.add_metric(_labels(beat), read(beat))
        yield gauge
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(f"envbus_server_{name}", text, labels=_SERVER)
        for beat in beats:
            counter.add_metric(_labels(beat), read(beat))
        yield counter
    yield _info(beats)
    yield _states(beats)
    yield from _rollouts(beats)


def controller_metrics(controllers: Sequence[ControllerBeat]) -> Iterator[Metric]:
    """Make the metrics of controllers from their latest heartbeats."""
    wanted = GaugeMetricFamily(
        "envbus_controller_replicas", "Servers that the controller wants of an env.", labels=("controller", "env")
    )
    failed = GaugeMetricFamily(
        "envbus_controller_env_failed", "1 where the controller has given an env up.", labels=("controller", "env")
    )
    restarts = CounterMetricFamily(
        "envbus_controller_restarts",
        "Times that the process in one place of an env was started again.",
        labels=("controller", "env", "place"),
    )
    for beat in controllers:
        for env in beat.envs:
            wanted.add_metric([beat.controller, _text(env.env)], env.replicas)
            failed.add_metric([beat.controller, _text(env.env)], env.failed is not None)
        for process in beat.processes:
            restarts.add_metric([beat.controller, _text(process.env), str(process.slot)], process.restarts)
    yield from (wanted, failed, restarts)


def _info(beats: Iterable[Beat]) -> Metric:
    labels = (*_SERVER, "host", "version", "env_version", "fingerprint")
    info = GaugeMetricFamily("envbus_server_info", "Who the server is; always 1.", labels=labels)
    for beat in beats:
        versions = beat.versions
        own = [beat.host, versions.get("envbus", ""), versions.get("env", ""), beat.fingerprint]
        info.add_metric([*_labels(beat), *map(_text, own)], 1)
    return info


def _states(beats: Iterable[Beat]) -> Metric:
    states = GaugeMetricFamily(
        "envbus_server_state", "1 for the state that the server is in, 0 for the others.", labels=(*_SERVER, "state")
    )
    for beat in beats:
        for state in _STATES:
            states.add_metric([*_labels(beat), state], beat.state == state)
    return states


def _rollouts(beats: Iterable[Beat]) -> Iterator[Metric]:
    ended = CounterMetricFamily("envbus_server_rollouts", "Rollouts that ended.", labels=(*_SERVER, "outcome"))
    errors = CounterMetricFamily(
        "envbus_server_rollout_errors", "Failed rollouts by type of error.", labels=(*_SERVER, "type")
    )
    durations = HistogramMetricFamily(
        "envbus_server_rollout_duration_seconds", "How long rollouts took that were not cancelled.", labels=_SERVER
    )
    for beat in beats:
        for outcome, count in (("done", beat.done), ("failed", beat.failed), ("cancelled", beat.cancelled)):
            ended.add_metric([*_labels(beat), outcome], count)
        for kind, count in beat.failed_by_type.items():
            errors.add_metric([*_labels(beat), _text(kind)], count)
        if len(beat.duration_counts) == len(DURATION_BOUNDS_S) + 1:
            durations.add_metric(_labels(beat), _buckets(beat.duration_counts), beat.duration_sum_s)
    yield from (ended, errors, durations)


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in DURATION_BOUNDS_S), "+Inf"]
    return [(bound, sum(counts[: index + 1])) for index, bound in enumerate(bounds)]


def _labels(beat: Beat) -> list[str]:
    return [_text(beat.env), beat.server]


def _text(value: str) -> str:
    """A label's value: names may have lone surrogates, which cannot be sent."""
    return value.encode("utf-8", "replace").decode()


def metrics_page(metrics: Callable[[], Iterable[Metric]], *, accept: str = "") -> tuple[bytes, str]:
    """Return ``(body, content type)`` of a metrics page, in the format that the Accept header asks for."""
    registry = CollectorRegistry()
    registry.register(_Source(metrics))
    encode, content_type = exposition.choose_encoder(accept)
    body: Any = encode(registry)
    return body, content_type


class _Source(Collector):
    """Hands metrics to the exposition as they are."""

    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._metrics()
