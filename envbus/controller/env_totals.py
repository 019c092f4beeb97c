"""One env over all its servers and controllers (pure): sums, what waits, and what its servers do not agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from envbus.bus.control_messages import EnvReport
from envbus.controller.fleet_views import PRESENT, WORKING, EnvView, ServerView, Totals
from envbus.controller.sane_beats import MAX_TEXT


def env_view(
    name: str,
    servers: Sequence[ServerView],
    *,
    waiting: Iterable[Mapping[str, int]],
    reports: Sequence[EnvReport],
) -> EnvView:
    """Return the view of one env.

    Args:
        name: The env.
        servers: Its servers, gone ones included.
        waiting: What each server says of jobs that wait, by client.
        reports: What controllers say of it.
    """
    present = [server for server in servers if server.state in PRESENT]
    clients = _merged(waiting)
    versions = _distinct([server.versions for server in present if server.versions])
    fingerprints = tuple(sorted({server.fingerprint for server in present if server.fingerprint}))
    mixed = [] if len(fingerprints) < 2 else ["fingerprint"]
    mixed += [package for package, found in versions.items() if len(found) > 1]
    problems = [report.failed[:MAX_TEXT] for report in reports if report.failed]
    problems += [server.problem for server in servers if server.state == "failed" and server.problem]
    return EnvView(
        env=name,
        totals=_totals(present, servers, waiting=sum(clients.values()), clients=len(clients)),
        states=dict(sorted(Counter(server.state for server in servers).items())),
        env_ids=tuple(sorted({s.env_id for s in servers if s.env_id} | {report.env_id for report in reports})),
        hosts=tuple(sorted({server.host for server in present if server.host})),
        wanted=sum(max(0, report.replicas) for report in reports) if reports else None,
        autoscale=any(report.autoscale for report in reports),
        failed_by_type=dict(_summed(server.failed_by_type for server in servers)),
        waiting_by_client=clients,
        versions=versions,
        fingerprints=fingerprints,
        mixed=tuple(mixed),
        problems=tuple(dict.fromkeys(problems)),
    )


def sum_totals(totals: Iterable[Totals]) -> Totals:
    """Totals of several envs."""
    each = list(totals)
    return Totals(
        servers=sum(one.servers for one in each),
        slots=sum(one.slots for one in each),
        in_flight=sum(one.in_flight for one in each),
        waiting_clients=sum(one.waiting_clients for one in each),
        waiting_jobs=sum(one.waiting_jobs for one in each),
        rate_per_s=sum(one.rate_per_s for one in each),
        done=sum(one.done for one in each),
        failed=sum(one.failed for one in each),
        oldest_job_s=max([0.0, *(one.oldest_job_s for one in each)]),
        lag_s=max([0.0, *(one.lag_s for one in each)]),
    )


def _totals(present: Sequence[ServerView], servers: Sequence[ServerView], *, waiting: int, clients: int) -> Totals:
    working = [server for server in present if server.state in WORKING]
    return Totals(
        servers=len(present),
        slots=sum(server.slots for server in working),
        in_flight=sum(server.in_flight for server in present),
        waiting_clients=max([clients, *(server.waiting_clients for server in working)]),
        waiting_jobs=max([waiting, *(server.waiting_jobs for server in working)]),
        rate_per_s=sum(server.rate_per_s or 0.0 for server in present),
        done=sum(server.done for server in servers),
        failed=sum(server.failed for server in servers),
        oldest_job_s=max([0.0, *(server.oldest_job_s for server in present)]),
        lag_s=max([0.0, *(server.lag_s for server in present)]),
    )


def _merged(waiting: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Jobs that wait by client. Each client tells every server, so the largest number counts and not the sum."""
    merged: dict[str, int] = {}
    for by_client in waiting:
        for client, jobs in by_client.items():
            merged[client] = max(jobs, merged.get(client, 0))
    return dict(sorted(merged.items(), key=lambda item: -item[1]))


def _distinct(all_versions: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    packages = sorted({package for versions in all_versions for package in versions})
    return {
        package: tuple(sorted({versions.get(package, "none") for versions in all_versions})) for package in packages
    }


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total
