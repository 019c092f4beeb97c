"""deploy/kubernetes: what is built is valid and fits together, scales by the right number, and mistakes are seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from artefacts import complaint, needed
from kubernetes_checks import manifest_problems, scaled_envs
from kubernetes_stage import ENVS, FOLDER, BuildError, build, built, secrets_in, server_pod
from promql import LABELS, labels_in, metrics_in, served_metrics
from readme_steps import README, make_access

ADAPTER = yaml.safe_load((FOLDER / "components/hpa/prometheus-adapter.yaml").read_text(encoding="utf-8"))
BASE, NATS, KEDA, HPA = "base/", "nats/", "components/keda/", "components/hpa/"
TEXT, NUMBER = "overlays/reverse-text/", "overlays/guess-number/"


def problems(folder: Path, env: str) -> list[str]:
    """What is wrong with one env's manifests beside those of NATS, or with those of NATS alone."""
    keys = {name: set(files) for name, files in secrets_in(README).items()}
    try:
        nats = built(folder / "nats") if env == NATS else build("nats")
        manifests = [*nats, *([] if env == NATS else built(folder / env))]
    except (BuildError, yaml.YAMLError) as error:
        return [str(error)]
    return manifest_problems(manifests, secrets=keys)


@pytest.mark.parametrize("env", ENVS)
def test_nothing_is_wrong_with_it(env: str) -> None:
    assert problems(FOLDER, env) == []


MISTAKES = [
    # misspelled
    (BASE + "deployment.yaml", "readinessProbe:", "readynessProbe:", "readynessProbe"),
    (BASE + "deployment.yaml", "terminationGracePeriodSeconds", "terminationGraceSeconds", "terminationGraceSeconds"),
    (BASE + "deployment.yaml", "apiVersion: apps/v1", "apiVersion: apps/v1beta1", "has no such kind"),
    (
        BASE + "poddisruptionbudget.yaml",
        "maxUnavailable: 1",
        'maxUnavailable: "one"\n  minAvailable: {}',
        "minAvailable",
    ),
    (KEDA + "scaledobject.yaml", "minReplicaCount", "minReplicas", "minReplicas"),
    (KEDA + "scaledobject.yaml", 'threshold: "0.8"', "threshold: 0.8", "is not of type 'string'"),
    (HPA + "horizontalpodautoscaler.yaml", "averageValue: 800m", "averagevalue: 800m", "averagevalue"),
    (TEXT + "kustomization.yaml", "nameSuffix", "nameSufix", "nameSufix"),
    (TEXT + "kustomization.yaml", "components/keda", "components/kedda", "kedda"),
    (
        BASE + "deployment.yaml",
        "            - { name: metrics, containerPort: 9464 }\n",
        "            - { name: http, containerPort: 9464 }\n",
        "has no port metrics",
    ),
    (BASE + "deployment.yaml", "path: /readyz", "path: /livez", "readinessProbe asks /livez"),
    (BASE + "deployment.yaml", "serviceAccountName: env", "serviceAccountName: envbus", "no service account envbus"),
    (BASE + "deployment.yaml", "secretName: envbus-server", "secretName: envbus-servers", "nobody makes the secret"),
    (BASE + "deployment.yaml", "key: server.nk", "key: seed.nk", "has no seed.nk"),
    (BASE + "deployment.yaml", "configMapRef: { name: env }", "configMapRef: { name: envs }", "no config map envs"),
    (BASE + "deployment.yaml", "            - { name: tmp, mountPath: /tmp }\n", "", "volume tmp is mounted nowhere"),
    (
        BASE + "deployment.yaml",
        "contexts/server.json }\n          ports",
        "server.json }\n          ports",
        "is in no volume",
    ),
    (
        BASE + "deployment.yaml",
        "matchLabels: { app.kubernetes.io/name: envbus }\n  template",
        "matchLabels: { app: envbus }\n  template",
        "does not select its own pods",
    ),
    (BASE + "poddisruptionbudget.yaml", "name: envbus", "name: env", "selects no pods"),
    (
        BASE + "networkpolicy.yaml",
        "  podSelector:\n    matchLabels: { app.kubernetes.io/name: envbus }",
        "  podSelector:\n    matchLabels: { app: envbus }",
        "selects no pods",
    ),
    (
        BASE + "networkpolicy.yaml",
        "matchExpressions: [{ key: app.kubernetes.io/name, operator: In, values: [nats] }]",
        "matchLabels: { app.kubernetes.io/name: nats }",
        "selects no pods of this namespace",
    ),
    (BASE + "networkpolicy.yaml", "port: 4222", "port: 4223", "nats has no port 4223"),
    (NATS + "service.yaml", "selector: { app.kubernetes.io/name: nats }", "selector: { app: nats }", "selects no pods"),
    (NATS + "service.yaml", "targetPort: client", "targetPort: 4223", "has no port 4223"),
    (BASE + "deployment.yaml", "--max-concurrent=", "--concurrency=", "No such option"),
    (BASE + "deployment.yaml", "$(GRACE)", "$(GRACE_S)", "names no variable"),
    (BASE + "deployment.yaml", "--metrics-port=9464", "--metrics-port=9465", "served on port 9465"),
    (BASE + "kustomization.yaml", "GRACE=1800", "GRACE=3600", "terminationGracePeriodSeconds is too short"),
    (BASE + "kustomization.yaml", "MAX_CONCURRENT=64", "MAX_CONCURRENT=many", "Invalid value for '--max-concurrent'"),
    (BASE + "kustomization.yaml", "HOLD_RESULTS_BYTES=1073741824", "HOLD_RESULTS_BYTES=4294967296", "of a limit of"),
    (BASE + "kustomization.yaml", "HOLD_RESULTS_BYTES", "HOLD_RESULT_BYTES", "hold_result_bytes"),
    (
        BASE + "deployment.yaml",
        "          args:\n",
        "          lifecycle: { preStop: { exec: { command: [kill, '1'] } } }\n          args:\n",
        "a preStop hook",
    ),
    (
        NUMBER + "kustomization.yaml",
        "'ENV_ARGS={\"highest\": 1000}'",
        "'ENV_ARGS={highest: 1000}'",
        "Expecting property name",
    ),
    (
        BASE + "deployment.yaml",
        "readOnlyRootFilesystem: true",
        "readOnlyRootFilesystem: false",
        "readOnlyRootFilesystem",
    ),
    (BASE + "deployment.yaml", "drop: [ALL]", "add: [NET_ADMIN]", "capabilities"),
    (BASE + "deployment.yaml", "enableServiceLinks: false", "enableServiceLinks: true", "enableServiceLinks"),
    (BASE + "deployment.yaml", "            limits: { memory: 4Gi }\n", "", "has no limit of memory"),
    (KEDA + "scaledobject.yaml", "minReplicaCount: 1", "minReplicaCount: 0", "nobody hears that clients wait"),
    (
        TEXT + "kustomization.yaml",
        "fieldPaths: [spec.scaleTargetRef.name]",
        "fieldPaths: [metadata.labels.app]\n        options: { create: true }",
        "no deployment env",
    ),
    (TEXT + "kustomization.yaml", "index: 3", "index: 1", "looks at"),
    (TEXT + "kustomization.yaml", "namespace: envbus\n", "", "is in no namespace of this fleet"),
    (
        KEDA + "kustomization.yaml",
        "op: remove, path: /spec/replicas",
        "op: replace, path: /spec/replicas, value: 2",
        "of its own",
    ),
    (NUMBER + "kustomization.yaml", "fieldPath: data.ENV_NAME", "fieldPath: data.ENV_ID", "looks at"),
]


@pytest.mark.parametrize(("file", "old", "new", "seen"), MISTAKES)
def test_a_mistake_is_seen(file: str, old: str, new: str, seen: str, tmp_path: Path) -> None:
    """In the env whose overlay is broken; in any, if it is what all of them share."""
    copy = shutil.copytree(FOLDER, tmp_path / "kubernetes")
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text, f"{file} has no {old!r}"
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    users = {NUMBER: NUMBER, HPA: NUMBER, TEXT: TEXT, KEDA: TEXT, NATS: NATS}
    env = next((user for folder, user in users.items() if file.startswith(folder)), BASE)
    if (file, new[:4]) in NEEDS_A_LABEL:
        env = TEXT
    found = problems(copy, env)
    assert any(seen in problem for problem in found), found


NEEDS_A_LABEL = {(BASE + "networkpolicy.yaml", "matc")}
"""Mistakes that only show once an overlay adds the label of its env."""


# ---- the number that scales


def query_of(env: str) -> str:
    (scaler,) = [each for each in build(env) if each["kind"] == "ScaledObject"]
    (trigger,) = scaler["spec"]["triggers"]
    return str(trigger["metadata"]["query"])


def adapter_query(env: str) -> str:
    (rule,) = ADAPTER["rules"]["external"]
    filled = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"])
    return str(filled.replace("<<.LabelMatchers>>", f'env="{env}"'))


def test_both_scalers_ask_for_the_same_number_of_metrics_that_exist() -> None:
    query = query_of("overlays/reverse-text")
    assert query == adapter_query("reverse-text")
    assert metrics_in(query) <= served_metrics()
    assert labels_in(query) <= LABELS
    (hpa,) = [each for each in build("overlays/guess-number") if each["kind"] == "HorizontalPodAutoscaler"]
    assert hpa["spec"]["metrics"][0]["external"]["metric"]["name"] == ADAPTER["rules"]["external"][0]["name"]["as"]
    assert scaled_envs(hpa["spec"]) == {"guess-number-1000"}


SERIES = {
    # Two servers that take jobs, the first also on a controller's page; one that drains; one of another env.
    'envbus_server_slots{env="reverse-text",server="a",instance="pod-a"}': 64,
    'envbus_server_slots{env="reverse-text",server="a",instance="controller"}': 64,
    'envbus_server_slots{env="reverse-text",server="b",instance="pod-b"}': 64,
    'envbus_server_slots{env="reverse-text",server="c",instance="pod-c"}': 64,
    'envbus_server_slots{env="other",server="d",instance="pod-d"}': 16,
    'envbus_server_in_flight{env="reverse-text",server="a",instance="pod-a"}': 64,
    'envbus_server_in_flight{env="reverse-text",server="a",instance="controller"}': 63,
    'envbus_server_in_flight{env="reverse-text",server="b",instance="pod-b"}': 32,
    'envbus_server_in_flight{env="reverse-text",server="c",instance="pod-c"}': 50,
    'envbus_server_in_flight{env="other",server="d",instance="pod-d"}': 16,
    'envbus_server_waiting_jobs{env="reverse-text",server="a",instance="pod-a"}': 96,
    'envbus_server_waiting_jobs{env="reverse-text",server="a",instance="controller"}': 90,
    'envbus_server_waiting_jobs{env="reverse-text",server="b",instance="pod-b"}': 96,
    'envbus_server_waiting_jobs{env="reverse-text",server="c",instance="pod-c"}': 0,
    'envbus_server_waiting_jobs{env="other",server="d",instance="pod-d"}': 500,
    'envbus_server_state{env="reverse-text",server="a",instance="pod-a",state="full"}': 1,
    'envbus_server_state{env="reverse-text",server="a",instance="controller",state="full"}': 1,
    'envbus_server_state{env="reverse-text",server="b",instance="pod-b",state="ready"}': 1,
    'envbus_server_state{env="reverse-text",server="b",instance="pod-b",state="full"}': 0,
    'envbus_server_state{env="reverse-text",server="c",instance="pod-c",state="ready"}': 0,
    'envbus_server_state{env="reverse-text",server="c",instance="pod-c",state="draining"}': 1,
    'envbus_server_state{env="other",server="d",instance="pod-d",state="full"}': 1,
}


def test_the_number_is_that_of_servers_the_env_could_fill(tmp_path: Path) -> None:
    """64 + 32 run on servers that take jobs and 96 wait: 192 of 64 slots each."""
    promtool = needed("promtool", package="Debian's package prometheus")
    rule = {"record": "load", "expr": query_of("overlays/reverse-text")}
    series = [{"series": name, "values": f"{value}x4"} for name, value in SERIES.items()]
    # One series: more than one is an error for KEDA.
    sample = {"labels": 'load{env="reverse-text"}', "value": 3}
    asked = {"expr": "load", "eval_time": "2m", "exp_samples": [sample]}
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "scaling", "rules": [rule]}]}))
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    assert complaint([promtool, "test", "rules", "test.yml"], folder=tmp_path) is None


# ---- access


def test_the_readme_makes_the_secrets_of_what_envbus_nats_writes(tmp_path: Path) -> None:
    """Every file exists, and lies in the pod where the context, by relative paths, looks for it."""
    access, context = _made(tmp_path), tmp_path / "access/contexts/server.json"
    for files in secrets_in(README).values():
        for file in files.values():
            assert file.startswith("keys/") or (tmp_path / file).is_file(), file
    pod = server_pod(build("base"))
    (volume,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
    lies = {item["path"]: tmp_path / secrets_in(README)[volume["secretName"]][item["key"]] for item in volume["items"]}
    settings = json.loads(context.read_text())
    for key in ("nkey", "ca", "cert", "key"):
        wanted = (context.parent / settings[key]).resolve()
        assert lies[str(PurePosixPath(wanted.relative_to(access.resolve())))].resolve() == wanted, key
    assert settings["url"].split(",")[0] == "tls://nats.envbus.svc:4222"


def test_nats_finds_its_certificates(tmp_path: Path) -> None:
    _made(tmp_path)
    (nats,) = [each for each in build("nats") if each["kind"] == "StatefulSet"]
    pod: dict[str, Any] = nats["spec"]["template"]["spec"]
    folder = pod["containers"][0]["volumeMounts"][0]["mountPath"]
    there = {f"{folder}/{item['path']}" for item in pod["volumes"][0]["secret"]["items"]}
    config = (tmp_path / "access/nats.conf").read_text()
    for name in ("ca.pem", "server.pem", "server.key"):
        assert f'"/etc/nats/certificates/{name}"' in config
        assert f"/etc/nats/certificates/{name}" in there
    assert pod["containers"][0]["args"] == ["--config", f"{folder}/nats.conf"]
    assert "127.0.0.1:8222" in config, "what its probes ask"


def _made(folder: Path) -> Path:
    """The folder ``access``, as the README has it made."""
    shutil.copytree(FOLDER, folder / "kubernetes")
    return make_access("kubernetes", folder)
