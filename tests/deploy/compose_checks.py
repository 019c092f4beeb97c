"""What is wrong with a compose file: what its schema cannot see, too. The generated files must be there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import check_jsonschema
import jsonschema
import yaml
from envbus_commands import health_problems, http_port, parsed
from strict_yaml import read

from envbus.controller.spec import read_fleet_file
from envbus.errors import UsageError
from envbus.settings import ServerSettings

_SCHEMA_FILE = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
SCHEMA = jsonschema.Draft202012Validator(json.loads(_SCHEMA_FILE.read_text(encoding="utf-8")))
VARIABLES = {"ENVBUS_UID": "12345", "ENVBUS_GID": "12345"}
"""What the README has one set."""
OWN_USER = {"prom/prometheus"}
"""Images whose own user is not root."""
PORTS = {"nats": 4222, "prom/prometheus": 9090}
"""What programs that are not ours listen on."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
_SECONDS = re.compile(r"^(?:(\d+)m)?(?:(\d+)s)?$")


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """Put variables into a compose file."""

    def value(match: re.Match[str]) -> str:
        name, kind, other = match.groups()
        if name in variables:
            return variables[name]
        if kind != "-":
            raise UsageError(f"the variable {name} is not set: {other}")
        return other

    return _VARIABLE.sub(value, text)


def compose_problems(file: Path) -> list[str]:
    """Everything that is wrong with a compose file and the files that it names."""
    try:
        document = read(interpolated(file.read_text(encoding="utf-8"), VARIABLES))
    except (UsageError, yaml.YAMLError) as error:
        return [str(error)]
    wrong = [f"{error.json_path}: {error.message}" for error in SCHEMA.iter_errors(document)]
    return wrong or list(Compose(document, file.parent).problems())


class Compose:
    """A compose file that fits its schema."""

    def __init__(self, document: Mapping[str, Any], folder: Path) -> None:
        self.document = document
        self.folder = folder
        self.services: dict[str, dict[str, Any]] = document["services"]

    def files_of(self, service: str) -> dict[str, Path]:
        """Path in the container → file here, for what is mounted read-only."""
        mounts = [(kind, mount) for kind in ("configs", "secrets") for mount in self.services[service].get(kind, [])]
        known = {(kind, name): each for kind in ("configs", "secrets") for name, each in self.document[kind].items()}
        return {
            mount["target"]: self.folder / known[kind, mount["source"]]["file"]
            for kind, mount in mounts
            if (kind, mount["source"]) in known
        }

    def problems(self) -> Iterator[str]:
        """What the schema cannot see."""
        for kind in ("configs", "secrets"):
            for name, each in self.document[kind].items():
                if not (self.folder / each["file"]).is_file():
                    yield f"{kind}.{name}: there is no file {each['file']}"
        yield from self._unused()
        for name, service in self.services.items():
            for check in (_containment, self._references, self._ports, self._image, self._health, self._envbus):
                for problem in check(name, service):
                    yield f"{name}: {problem}"
        yield from self._scraping()

    def _names(self, service: Mapping[str, Any], kind: str) -> list[str]:
        used = service.get(kind, [])
        if kind in ("configs", "secrets"):
            return [each["source"] for each in used]
        return [each.split(":")[0] for each in used]

    def _references(self, name: str, service: Mapping[str, Any]) -> Iterator[str]:
        for kind in ("networks", "volumes", "configs", "secrets"):
            for used in self._names(service, kind):
                if used not in self.document[kind]:
                    yield f"{kind} has no {used!r}"
        for other, how in service.get("depends_on", {}).items():
            if other not in self.services:
                yield f"depends on {other!r}, which is no service"
            elif how["condition"] == "service_healthy" and "healthcheck" not in self.services[other]:
                yield f"waits for the health of {other}, which has no check"

    def _unused(self) -> Iterator[str]:
        for kind in ("networks", "volumes", "configs", "secrets"):
            used = {each for service in self.services.values() for each in self._names(service, kind)}
            yield from (f"{kind}.{name} is used by nobody" for name in self.document[kind] if name not in used)

    def _ports(self, name: str, service: Mapping[str, Any]) -> Iterator[str]:
        for published in service.get("ports", []):
            host, _, inside = published.rpartition(":")
            if not host.startswith("127.0.0.1:"):
                yield f"port {published} is published to other hosts"
            if int(inside) != self._listens(name):
                yield f"port {inside} is published, but it listens on {self._listens(name)}"

    def _listens(self, name: str) -> int | None:
        service = self.services[name]
        own = PORTS.get(service["image"].partition(":")[0])
        return own if own is not None else self._http_port(name)

    def _http_port(self, name: str) -> int | None:
        command = self.services[name]["command"]
        fleet = next((file for path, file in self.files_of(name).items() if path in command), None)
        try:
            return http_port(command, fleet_file=fleet)
        except UsageError:
            return None  # said elsewhere

    def _image(self, name: str, service: Mapping[str, Any]) -> Iterator[str]:
        _, _, tag = service["image"].partition(":")
        if not tag or tag == "latest":
            yield f"image {service['image']} has no version"
        build = service.get("build")
        if build is not None and not (self.folder / build["context"] / build["dockerfile"]).is_file():
            yield f"there is no {build['dockerfile']} in {build['context']}"

    def _health(self, name: str, service: Mapping[str, Any]) -> Iterator[str]:
        kind, *command = service.get("healthcheck", {}).get("test", [""])
        if kind != "CMD":
            yield "has no health check of the form CMD"
        elif service["image"].startswith("envbus:"):
            yield from health_problems(command, self._http_port(name))

    def _envbus(self, name: str, service: Mapping[str, Any]) -> Iterator[str]:
        if not service["image"].startswith("envbus:"):
            return
        try:
            options = parsed(service["command"])
        except UsageError as error:
            yield str(error)
            return
        contexts = [path for key, path in environment_of(service).items() if key == "ENVBUS_CONTEXT"]
        if "targets" in options:
            fleet_file = self.files_of(name).get(options["targets"][0])
            if fleet_file is None:
                yield f"{options['targets'][0]} is not mounted"
                return
            try:
                fleet = read_fleet_file(fleet_file)
            except UsageError as error:
                yield str(error)
                return
            contexts += [str(path) for path in (fleet.bus.context, fleet.bus.server_context) if path is not None]
            stop_s = max(env.grace for env in fleet.env) + ServerSettings().collect_grace_s
            yield from _enough_time(service, stop_s + ServerSettings().teardown_timeout_s)
        if not contexts:
            yield "has no context to connect with"
        for context in contexts:
            yield from self._context(name, context)

    def _context(self, name: str, context: str) -> Iterator[str]:
        """A context is mounted, and so is all that it names, by paths that are relative to its own folder."""
        mounted = self.files_of(name)
        if context not in mounted:
            yield f"the context {context} is not mounted"
            return
        if not mounted[context].is_file():
            return  # said elsewhere
        settings = json.loads(mounted[context].read_text(encoding="utf-8"))
        for key in ("nkey", "ca", "cert", "key"):
            wanted = _lexical(PurePosixPath(context).parent / settings[key])
            source = mounted[context].parent / settings[key]
            if wanted not in mounted or mounted[wanted].resolve() != source.resolve():
                yield f"{key} of {context} is {wanted}, where {source.name} is not mounted"

    def _scraping(self) -> Iterator[str]:
        """Prometheus asks a service by its name, on its port, on a network that both have."""
        for name, service in self.services.items():
            config = self.files_of(name).get("/etc/prometheus/prometheus.yml")
            if config is None:
                continue
            scraped = yaml.safe_load(config.read_text(encoding="utf-8"))
            for rules in scraped["rule_files"]:
                if f"/etc/prometheus/{rules}" not in self.files_of(name):
                    yield f"{name}: {rules} is not mounted"
            for target in [
                each for job in scraped["scrape_configs"] for s in job["static_configs"] for each in s["targets"]
            ]:
                host, _, port = target.partition(":")
                if host not in self.services or self._http_port(host) != int(port):
                    yield f"{name}: nobody serves metrics at {target}"
                elif not set(service["networks"]) & set(self.services[host]["networks"]):
                    yield f"{name}: {host} is on no network of it"


def environment_of(service: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a service that have a value."""
    given = service.get("environment", {})
    return dict(each.split("=", 1) for each in given if "=" in each) if isinstance(given, list) else dict(given)


def _containment(name: str, service: Mapping[str, Any]) -> Iterator[str]:
    if not service.get("read_only"):
        yield "its root can be written"
    if service.get("cap_drop") != ["ALL"] or service.get("cap_add"):
        yield "keeps capabilities"
    if "no-new-privileges:true" not in service.get("security_opt", []):
        yield "may gain privileges"
    if service.get("privileged") or service.get("network_mode") == "host" or service.get("pid") == "host":
        yield "is not contained"
    user = str(service.get("user", ""))
    if service["image"].partition(":")[0] not in OWN_USER and (not user or user.partition(":")[0] in ("0", "root")):
        yield "runs as root"
    if any("docker.sock" in str(volume) for volume in service.get("volumes", [])):
        yield "has the engine's socket"
    if service.get("restart") not in ("unless-stopped", "always"):
        yield "is not started again"


def _enough_time(service: Mapping[str, Any], needed_s: float) -> Iterator[str]:
    match = _SECONDS.match(service.get("stop_grace_period", "10s"))
    given_s = int(match[1] or 0) * 60 + int(match[2] or 0) if match else 0
    if given_s < needed_s + 10:
        yield f"stop_grace_period is {given_s} s, but a stop may take {needed_s:.0f} s"


def _lexical(path: PurePosixPath) -> str:
    """Without ``..``; links are no matter here."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return str(PurePosixPath(*parts))
