"""deploy/grafana: a dashboard that Grafana can show, whose queries are PromQL about metrics that a fleet has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from artefacts import DEPLOY, assert_told, broken_copy, complaint, needed
from prometheus_client.samples import Sample
from promql import LABELS, labels_in, metrics_in, served_metrics

from envbus.bus.control_messages import ControllerBeat, EnvReport, ProcessReport
from envbus.bus.messages import DURATION_BOUNDS_S, Beat
from envbus.server.metrics import controller_metrics, server_metrics

FOLDER = DEPLOY / "grafana"
FILE = "envbus-fleet.json"
KEYS = {
    "dashboard": "title uid description tags schemaVersion version editable graphTooltip timezone refresh time "
    "templating annotations panels",
    "row": "id type title collapsed gridPos panels",
    "stat": "id type title description datasource gridPos targets fieldConfig options",
    "timeseries": "id type title description datasource gridPos targets fieldConfig options",
    "table": "id type title description datasource gridPos targets fieldConfig options transformations",
    "target": "refId datasource expr legendFormat",
    "gridPos": "x y w h",
    "variable": "name label type query current hide",
}
"""What each object has: Grafana passes over keys that it does not know, and makes up those that are missing."""
MORE = {
    "target": "format instant",
    "variable": "datasource definition refresh sort multi includeAll allValue",
}
"""What it may have, too."""
UNITS = {"none", "percentunit", "s", "bytes", "Bps"}
COLUMNS = 24


def problems(folder: Path) -> Iterator[str]:
    """What is wrong with a folder like deploy/grafana."""
    try:
        dashboard = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"not JSON: {error}"
        return
    yield from wrong_keys("dashboard", dashboard)
    panels = dashboard.get("panels", [])
    for panel in panels:
        yield from panel_problems(panel)
    yield from places(panels)
    variables = {variable.get("name"): variable for variable in dashboard.get("templating", {}).get("list", [])}
    for variable in variables.values():
        yield from wrong_keys("variable", variable)
    queries = list(queries_of(panels, variables))
    known = {f"${name}" for name in variables} | {"$__rate_interval"}
    for title, query in queries:
        if unknown := set(re.findall(r"\$\w+", query)) - known:
            yield f"{title}: there are no variables {unknown}"
        if unknown := metrics_in(plain(query)) - served_metrics():
            yield f"{title}: nobody has the metrics {unknown}"
        if unknown := labels_in(query) - LABELS:
            yield f"{title}: no metric has the labels {unknown}"
    yield from parse_errors(folder, [query for _, query in queries])


def wrong_keys(kind: str, found: dict[str, Any]) -> Iterator[str]:
    keys = set(KEYS[kind].split())
    if wrong := (keys - found.keys()) | (found.keys() - keys - set(MORE.get(kind, "").split())):
        yield f"{kind} {found.get('title') or found.get('name', '')}: missing or unknown: {sorted(wrong)}"


def panel_problems(panel: dict[str, Any]) -> Iterator[str]:
    if panel.get("type") not in KEYS:
        yield f"panel {panel.get('title')}: type {panel.get('type')}"
        return
    yield from wrong_keys(panel["type"], panel)
    for target in panel.get("targets", ()):
        yield from wrong_keys("target", target)
        legend = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        if unknown := legend - labels_in(target.get("expr", "")):
            yield f"{panel['title']}: its series have no labels {unknown}"
    for source in [panel, *panel.get("targets", ())]:
        if panel["type"] != "row" and source.get("datasource") != {"type": "prometheus", "uid": "${datasource}"}:
            yield f"{panel['title']}: another data source than the one that is chosen above"
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "none")
    if unit not in UNITS:
        yield f"{panel['title']}: unit {unit}"


def places(panels: list[dict[str, Any]]) -> Iterator[str]:
    """Each panel has a number and a place of its own."""
    if len({panel.get("id") for panel in panels}) != len(panels):
        yield "two panels have the same id"
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel.get("gridPos", {})
        yield from wrong_keys("gridPos", place)
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                if x >= COLUMNS or taken.setdefault((x, y), panel["title"]) != panel["title"]:
                    yield f"{panel['title']} lies over {taken.get((x, y), 'the edge')}"
                    return


def queries_of(panels: list[dict[str, Any]], variables: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every query with the title of what asks it."""
    for panel in panels:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
    for name, variable in variables.items():
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            yield f"variable {name}", f"count by ({label}) ({selector})"


def plain(query: str) -> str:
    """A query as Prometheus gets it."""
    return re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "5m"))


def parse_errors(folder: Path, queries: list[str]) -> Iterator[str]:
    """Promtool reads them as rules: of an expression by itself its older versions take no notice."""
    rules = [{"record": f"query:{number}", "expr": plain(query)} for number, query in enumerate(queries)]
    file = folder / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    if wrong := complaint([needed("promtool", package="Debian's package prometheus"), "check", "rules", file]):
        yield wrong


def test_the_dashboard_has_no_problems(tmp_path: Path) -> None:
    assert list(problems(broken_copy(FOLDER, tmp_path, FILE, "envbus fleet", "envbus fleet"))) == []


BEAT = Beat(
    **{name: 1 for name, field in Beat.model_fields.items() if field.annotation in (int, float)},
    server="s", env="e", env_id="e", state="ready", host="h", fingerprint="f", versions={"envbus": "1", "env": "2"},
    failed_by_type={"KeyError": 1}, duration_counts=[1] * (len(DURATION_BOUNDS_S) + 1),
)  # fmt: skip
CONTROLLER = ControllerBeat(
    controller="c", host="h", pid=1, version="1", started_at=1.0,
    envs=[EnvReport(env="e", env_id="e", replicas=2)],
    processes=[ProcessReport(server="s", env="e", slot=0, generation=1, pid=3, state="running", restarts=4)],
)  # fmt: skip


def test_every_query_finds_what_two_scraped_controllers_tell(tmp_path: Path) -> None:
    """Promtool runs them over the series of a small fleet; told to expect nothing, it says what it got."""
    samples = [
        sample for family in [*server_metrics([BEAT]), *controller_metrics([CONTROLLER])] for sample in family.samples
    ]
    series = [
        {"series": f"{each.name}{{{labels_text(each.labels, instance)}}}", "values": f"{rises(each)}x20"}
        for each in samples
        for instance in ("a", "b")
    ]
    panels = json.loads((FOLDER / FILE).read_text(encoding="utf-8"))["panels"]
    queries = [plain(query) for _, query in queries_of(panels, {})]
    cases = [{"expr": query, "eval_time": "10m", "exp_samples": []} for query in queries]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": cases}]}))
    said = complaint([needed("promtool", package="Debian's package prometheus"), "test", "rules", file])
    assert said is not None
    found = re.findall(r'expr: "(.*)", time: 10m,\s+exp:.*\s+got: *"?(.*)', said)
    assert [query.replace('\\"', '"') for query, _ in found] == queries, said
    assert not [query for query, got in found if "{" not in got]


def labels_text(labels: dict[str, str], instance: str) -> str:
    return ", ".join(f'{name}="{value}"' for name, value in {**labels, "instance": instance}.items())


def rises(sample: Sample) -> str:
    """A counter grows by one a minute; a bucket counts those below, too."""
    is_counter = sample.name.endswith(("_total", "_bucket", "_count", "_sum"))
    return f"0+{float(sample.value)}" if is_counter else str(float(sample.value))


def test_it_shows_what_an_operator_asks() -> None:
    """Use, the waiting line, throughput, failures, lag, held memory; by env and by server."""
    text = (FOLDER / FILE).read_text(encoding="utf-8")
    asked = "slots in_flight waiting_jobs waiting_clients rollouts_total rollout_errors_total"
    for name in [*asked.split(), "loop_lag_seconds", "held_result_bytes"]:
        assert f"envbus_server_{name}" in text
    assert "by (env)" in text
    assert "by (env, server)" in text


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        (
            "envbus_server_waiting_jobs",
            "envbus_server_waiting_job",
            "nobody has the metrics {'envbus_server_waiting_job'}",
        ),
        ("envbus_server_waiting_jobs", "evnbus_server_waiting_jobs", "nobody has the metrics"),
        ("envbus_server_rollouts_total", "envbus_server_rollouts", "nobody has the metrics"),
        ("by (env, server)", "by (env, sever)", "no metric has the labels {'sever'}"),
        ('state=~\\"ready|full\\"', 'sate=~\\"ready|full\\"', "no metric has the labels {'sate'}"),
        ("[$__rate_interval]", "[$__rate_intervall]", "no variables {'$__rate_intervall'}"),
        ('"name": "server"', '"name": "servers"', "no variables {'$server'}"),
        ("histogram_quantile(0.5, ", "histogram_quantil(0.5, ", "unknown function"),
        ("[5m])))", "[5m]))", "parse error"),
        ("[5m]", "[5 m]", "parse error"),
        ("{{outcome}}", "{{outcom}}", "no labels {'outcom'}"),
        ('"targets"', '"target"', "['target', 'targets']"),
        ('"expr"', '"exrp"', "['expr', 'exrp']"),
        ('"gridPos"', '"gridpos"', "['gridPos', 'gridpos']"),
        ('"type": "timeseries"', '"type": "timeserie"', "type timeserie"),
        ('"uid": "${datasource}"', '"uid": "prometheus"', "another data source"),
        ('"unit": "percentunit"', '"unit": "percentunits"', "unit percentunits"),
        ('"id": 3,', '"id": 2,', "the same id"),
        ('"x": 8,', '"x": 7,', "lies over"),
        ('"panels": []\n    },', '"panels": []\n    }', "not JSON"),
    ],
)
def test_breaking_it_is_seen(tmp_path: Path, old: str, new: str, seen: str) -> None:
    assert_told(problems(broken_copy(FOLDER, tmp_path, FILE, old, new)), seen)
