"""What is wrong with built manifests: each by its schema, and all of them with each other."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from envbus_commands import parsed
from pod_checks import (
    Manifest,
    containment_problems,
    labels_of,
    lacks_port,
    memory_problems,
    pod_of,
    probe_problems,
)

from envbus.errors import UsageError
from envbus.settings import ServerSettings

# It reads megabytes of definitions anew for each manifest.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
KEDA_SCHEMA = json.loads((Path(__file__).parent / "keda_scaledobject.schema.json").read_text(encoding="utf-8"))
_WORKLOADS = ("Deployment", "StatefulSet")
_REFERENCE = re.compile(r"\$\((\w+)\)")


@functools.cache
def schema_problems(text: str) -> tuple[str, ...]:
    """What its schema has against a manifest in JSON; unknown keys count. Remembered: most are checked many times."""
    return tuple(_schema_problems(json.loads(text)))


def _schema_problems(manifest: Manifest) -> Iterator[str]:
    name = f"{manifest.get('kind')}/{manifest.get('metadata', {}).get('name')}"
    if manifest.get("kind") == "ScaledObject":
        for error in jsonschema.Draft202012Validator(KEDA_SCHEMA).iter_errors(manifest):
            yield f"{name}: {error.json_path}: {error.message}"
        return
    try:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{name}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        yield f"{name}: {manifest['apiVersion']} has no such kind"


def manifest_problems(manifests: Sequence[Manifest], *, secrets: Mapping[str, set[str]]) -> list[str]:
    """Everything that is wrong with the manifests of one namespace.

    Args:
        secrets: Keys of the secrets that the README has one make, by their names.
    """
    wrong = [problem for manifest in manifests for problem in schema_problems(json.dumps(manifest))]
    return wrong or list(Cluster(manifests, secrets).problems())


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects."""
    for each in selector.get("matchExpressions", []):
        value = labels.get(each["key"])
        fits = {"In": value in each.get("values", []), "Exists": value is not None}
        if not fits[each["operator"]]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


class Cluster:
    """Manifests that fit their schemas, as if they were applied."""

    def __init__(self, manifests: Sequence[Manifest], secrets: Mapping[str, set[str]]) -> None:
        self.manifests = manifests
        self.secrets = secrets
        self.workloads = [each for each in manifests if each["kind"] in _WORKLOADS]

    def of_kind(self, kind: str) -> list[Manifest]:
        return [each for each in self.manifests if each["kind"] == kind]

    def named(self, kind: str, name: str) -> Manifest | None:
        return next((each for each in self.of_kind(kind) if each["metadata"]["name"] == name), None)

    def selected(self, selector: Mapping[str, Any]) -> list[Manifest]:
        """The workloads whose pods a selector selects."""
        return [each for each in self.workloads if matches(selector, labels_of(each))]

    def problems(self) -> Iterator[str]:
        """What no schema sees."""
        for manifest in self.manifests:
            about = f"{manifest['kind']}/{manifest['metadata']['name']}"
            yield from (f"{about}: {problem}" for problem in self._problems_of(manifest))

    def _problems_of(self, manifest: Manifest) -> Iterator[str]:
        kind, spec = manifest["kind"], manifest.get("spec", {})
        if kind != "Namespace" and manifest["metadata"].get("namespace") != "envbus":
            yield "is in no namespace of this fleet"
        if kind in _WORKLOADS:
            yield from self._workload(manifest)
        elif kind == "Service":
            yield from self._service(spec)
        elif kind == "PodDisruptionBudget" and not self.selected(spec["selector"]):
            yield "selects no pods"
        elif kind == "NetworkPolicy":
            yield from self._network(spec)
        elif kind in ("ScaledObject", "HorizontalPodAutoscaler"):
            yield from self._scaler(spec)

    # ---- workloads

    def _workload(self, workload: Manifest) -> Iterator[str]:
        pod, spec = pod_of(workload), workload["spec"]
        (container,) = pod["containers"]
        if not matches(spec["selector"], labels_of(workload)):
            yield "its selector does not select its own pods"
        if any(
            not matches(each["labelSelector"], labels_of(workload)) for each in pod.get("topologySpreadConstraints", [])
        ):
            yield "spreads other pods than its own"
        if (service := spec.get("serviceName")) is not None and self.named("Service", service) is None:
            yield f"there is no service {service}"
        account = pod.get("serviceAccountName")
        if account is not None and self.named("ServiceAccount", account) is None:
            yield f"there is no service account {account}"
        yield from containment_problems(pod, container)
        yield from self._volumes(pod, container)
        yield from self._sources(container)
        yield from probe_problems(workload, container)
        if container["image"].startswith("envbus:"):
            yield from self._server(workload, pod, container)

    def _volumes(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
        volumes = {each["name"]: each for each in pod.get("volumes", [])}
        mounted = {each["name"] for each in container.get("volumeMounts", [])}
        yield from (f"there is no volume {name}" for name in sorted(mounted - volumes.keys()))
        yield from (f"volume {name} is mounted nowhere" for name in sorted(volumes.keys() - mounted))
        for volume in volumes.values():
            if (secret := volume.get("secret")) is not None:
                for item in secret["items"]:
                    yield from self._secret(secret["secretName"], item["key"])

    def _sources(self, container: Mapping[str, Any]) -> Iterator[str]:
        for each in container.get("envFrom", []):
            if self.named("ConfigMap", each["configMapRef"]["name"]) is None:
                yield f"there is no config map {each['configMapRef']['name']}"
        for variable in container.get("env", []):
            if (source := variable.get("valueFrom")) is not None:
                yield from self._secret(source["secretKeyRef"]["name"], source["secretKeyRef"]["key"])

    def _secret(self, name: str, key: str) -> Iterator[str]:
        if name not in self.secrets:
            yield f"nobody makes the secret {name}"
        elif key not in self.secrets[name]:
            yield f"the secret {name} has no {key}"

    # ---- servers of envbus

    def variables_of(self, container: Mapping[str, Any]) -> dict[str, str]:
        """The environment of a container, without what secrets hold."""
        given: dict[str, str] = {}
        for each in container.get("envFrom", []):
            config = self.named("ConfigMap", each["configMapRef"]["name"])
            given |= config["data"] if config is not None else {}
        return given | {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}

    def arguments_of(self, container: Mapping[str, Any]) -> list[str]:
        """Its arguments as Kubernetes gives them: variables put in, unknown ones left as they are."""
        variables = self.variables_of(container)
        return [_REFERENCE.sub(lambda m: variables.get(m[1], m[0]), each) for each in container["args"]]

    def _server(self, workload: Manifest, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
        arguments, variables = self.arguments_of(container), self.variables_of(container)
        yield from (f"{each} names no variable of the container" for each in arguments if _REFERENCE.search(each))
        try:
            options = parsed(arguments)
            json.loads(options["env_args"])
            settings = ServerSettings(**_settings_in(variables))
        except (UsageError, ValueError) as error:
            yield str(error)
            return
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        annotations = workload["spec"]["template"]["metadata"]["annotations"]
        if not options["metrics_port"] == ports.get("metrics") == int(annotations["prometheus.io/port"]):
            yield f"metrics are served on port {options['metrics_port']}, but {ports} and {annotations} say otherwise"
        needed_s = options["grace"] + settings.collect_grace_s + settings.teardown_timeout_s
        if pod.get("terminationGracePeriodSeconds", 30) < needed_s + 10:
            yield f"terminationGracePeriodSeconds is too short: a stop may take {needed_s:.0f} s"
        if "preStop" in container.get("lifecycle", {}):
            yield "a preStop hook that ends the server makes SIGTERM the second signal, which cancels rollouts"
        yield from memory_problems(container["resources"], settings.hold_results_bytes + settings.hold_inputs_bytes)
        yield from self._access(pod, container, variables.get("ENVBUS_CONTEXT"))

    def _access(self, pod: Mapping[str, Any], container: Mapping[str, Any], context: str | None) -> Iterator[str]:
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        files = {
            f"{mounts[volume['name']]}/{item['path']}"
            for volume in pod["volumes"]
            for item in volume.get("secret", {}).get("items", [])
            if volume["name"] in mounts
        }
        if context not in files:
            yield f"the context {context} is in no volume"

    # ---- what points at them

    def _service(self, spec: Mapping[str, Any]) -> Iterator[str]:
        chosen = self.selected({"matchLabels": spec["selector"]})
        if not chosen:
            yield "selects no pods"
        for port in spec["ports"]:
            yield from lacks_port(chosen, port.get("targetPort", port["port"]))

    def _network(self, spec: Mapping[str, Any]) -> Iterator[str]:
        own = self.selected(spec["podSelector"])
        if not own:
            yield "selects no pods"
        for rule in spec.get("ingress", []):
            for port in rule.get("ports", []):
                yield from lacks_port(own, port["port"])
            yield from self._peers(rule.get("from", []))
        for rule in spec.get("egress", []):
            yield from self._peers(rule["to"])
            for peer in rule["to"]:
                if set(peer) == {"podSelector"}:
                    for port in rule["ports"]:
                        yield from lacks_port(self.selected(peer["podSelector"]), port["port"])

    def _peers(self, peers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        for peer in peers:
            if set(peer) == {"podSelector"} and not self.selected(peer["podSelector"]):
                yield f"{dict(peer['podSelector'])} selects no pods of this namespace"
            elif peer.get("podSelector", {}).get("matchLabels", {}).get("envbus-env"):
                yield "asks pods that are no servers for the label of this env"

    def _scaler(self, spec: Mapping[str, Any]) -> Iterator[str]:
        target = self.named(spec["scaleTargetRef"].get("kind", "Deployment"), spec["scaleTargetRef"]["name"])
        if target is None:
            yield f"there is no deployment {spec['scaleTargetRef']['name']}"
            return
        if "replicas" in target["spec"]:
            yield "scales what has a number of replicas of its own: each apply would set it back"
        least, most = (
            spec.get(f"{which}{'ReplicaCount' if 'triggers' in spec else 'Replicas'}", 0) for which in ("min", "max")
        )
        if not 1 <= least <= most:
            yield f"from {least} to {most} servers; with none nobody hears that clients wait"
        name = parsed(self.arguments_of(pod_of(target)["containers"][0]))["name"]
        if scaled_envs(spec) != {name}:
            yield f"looks at {scaled_envs(spec)}, but the servers are {name!r} on the bus"


def scaled_envs(spec: Mapping[str, Any]) -> set[str]:
    """The envs whose load a scaler looks at."""
    if "triggers" in spec:
        return {env for each in spec["triggers"] for env in re.findall(r'\benv="([^"]*)"', each["metadata"]["query"])}
    return {each["external"]["metric"]["selector"]["matchLabels"]["env"] for each in spec["metrics"]}


def _settings_in(variables: Mapping[str, str]) -> dict[str, Any]:
    prefix = "ENVBUS_SERVER_"
    return {name.removeprefix(prefix).lower(): value for name, value in variables.items() if name.startswith(prefix)}
