"""What is wrong with one pod by itself: containment, probes, ports, memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Manifest = Mapping[str, Any]
_UNITS = {"": 1, "Mi": 1024**2, "Gi": 1024**3}


def pod_of(workload: Manifest) -> dict[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


def labels_of(workload: Manifest) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def lacks_port(workloads: Sequence[Manifest], port: str | int) -> Iterator[str]:
    for workload in workloads:
        ports = [each for container in pod_of(workload)["containers"] for each in container.get("ports", [])]
        if port not in [each["name"] for each in ports] + [each["containerPort"] for each in ports]:
            yield f"{workload['metadata']['name']} has no port {port}"


def probe_problems(workload: Manifest, container: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container.get(kind, {}).get("httpGet")
        if kind not in container:
            yield f"has no {kind}"
        elif asked is not None:
            yield from (f"{kind}: {problem}" for problem in lacks_port([workload], asked["port"]))
            if asked["path"] != ("/readyz" if kind == "readinessProbe" else "/livez"):
                yield f"{kind} asks {asked['path']}"


def containment_problems(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
    wanted = {
        "automountServiceAccountToken": (pod.get("automountServiceAccountToken"), False),
        "enableServiceLinks": (pod.get("enableServiceLinks"), False),
        "runAsNonRoot": (pod.get("securityContext", {}).get("runAsNonRoot"), True),
        "seccompProfile": (pod.get("securityContext", {}).get("seccompProfile"), {"type": "RuntimeDefault"}),
    }
    own = container.get("securityContext", {})
    wanted |= {
        "allowPrivilegeEscalation": (own.get("allowPrivilegeEscalation"), False),
        "readOnlyRootFilesystem": (own.get("readOnlyRootFilesystem"), True),
        "capabilities": (own.get("capabilities"), {"drop": ["ALL"]}),
        "privileged": (own.get("privileged", False), False),
        "hostNetwork": (pod.get("hostNetwork", False), False),
    }
    yield from (f"{name} is {found}" for name, (found, right) in wanted.items() if found != right)
    if "memory" not in container.get("resources", {}).get("limits", {}):
        yield "has no limit of memory"
    if container["image"].partition(":")[2] in ("", "latest"):
        yield f"image {container['image']} has no version"


def memory_problems(resources: Mapping[str, Mapping[str, str]], held: int) -> Iterator[str]:
    limit, least = (_bytes(resources.get(each, {}).get("memory", "0")) for each in ("limits", "requests"))
    if limit and held + least > limit:
        yield f"results and inputs may take {held} bytes of a limit of {limit}, where {least} are needed beside"


def _bytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(Mi|Gi|)", quantity)
    assert match is not None, quantity
    return int(match[1]) * _UNITS[match[2]]
