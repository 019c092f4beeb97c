"""The fleet file: what a controller runs, read from TOML and checked whole before anything starts.

Errors name the file, the key and, where it can be found, the line.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator

from envbus.bus.control_messages import MAX_REPLICAS
from envbus.bus.subjects import DEFAULT_PREFIX, Subjects, check_prefix, env_name
from envbus.controller.isolation import Isolation
from envbus.controller.policies import AutoscalePolicy, LivenessPolicy, Policy, RestartPolicy
from envbus.errors import UsageError
from envbus.model_urls import ANYTHING, UrlPattern, read_key_pair
from envbus.toml_file import TomlFile, key_of, problems, usage_error


def _known_prefix(prefix: str) -> str:
    try:
        return check_prefix(prefix)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _key_pair(entry: str) -> str:
    if entry != ANYTHING:
        read_key_pair(entry)
    return entry


def _url_pattern(entry: str) -> str:
    if entry != ANYTHING:
        UrlPattern.read(entry)
    return entry


Port = Annotated[int, Field(ge=0, le=65535)]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    Field(description="Level of the servers' logs."),
]


class BusSpec(Policy):
    """Table ``[bus]``: which NATS. Without an address: ENVBUS_URL, NATS_URL, else an embedded one."""

    address: str | None = None
    """NATS address; put secrets into ENVBUS_URL, or a context, instead."""
    context: str | None = None
    """NATS CLI context that the controller connects with: its name, or the path of its .json file."""
    server_context: str | None = None
    """The one that its servers connect with; default: the controller's."""
    embedded: bool = False
    """Start a NATS server on this host's loopback, which ends with the controller."""
    port: Port = 0
    """Of the embedded one; 0: a free one."""
    websocket_port: Port | None = None
    monitoring_port: Port | None = None
    prefix: Annotated[str, AfterValidator(_known_prefix)] = DEFAULT_PREFIX
    """First token of all subjects."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.address is not None and self.embedded:
            raise ValueError("give address or embedded, not both")
        if self.address is not None and self.context is not None:
            raise ValueError("give address or context, not both")
        if self.embedded and (self.context or self.server_context):
            raise ValueError("contexts do not go with an embedded NATS server")
        if (self.address or self.context) is not None and (self.port or self.websocket_port or self.monitoring_port):
            raise ValueError("ports are those of the embedded NATS server; they do not go with an address or a context")
        return self


class ControllerSpec(Policy):
    """Table ``[controller]``."""

    id: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Its name on the bus; default: host name and name of the fleet file."""
    log_dir: Path = Path("envbus-logs")
    """A folder in it is the controller's: logs of its servers, and what it needs to find them again."""
    adopt: bool = False
    """Servers outlive the controller's death, and the next controller of this name takes them over."""
    metrics_port: Port | None = None
    """Serve /metrics of the whole fleet, /livez and /readyz over HTTP on this port; 0: a free one."""
    metrics_host: str = "0.0.0.0"
    """Address to serve them on."""
    json_logs: bool = False
    """Servers log JSON lines."""
    cgroup: Path | None = None
    """A cgroup v2 folder that is the controller's own: each server gets a group in it. Default: what systemd has
    delegated, and only for servers whose limits need one."""


class EnvSpec(Isolation):
    """Table ``[[env]]``: one environment and how its servers are run."""

    id: str = Field(min_length=1)
    """As for load_environment."""
    name: str | None = None
    """Its name on the bus; default: id, with arguments also their digest."""
    args: dict[str, Any] = Field(default_factory=dict)
    extra_env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the loaded environment."""
    replicas: int = Field(1, ge=0, le=MAX_REPLICAS)
    max_concurrent: int = Field(64, ge=1)
    """Rollouts at once per server."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Added to the servers' environment variables."""
    python: str | None = None
    """Python to run the servers with, e.g. that of a virtual environment that has envbus and the env."""
    command: list[str] | None = Field(None, min_length=1)
    """What to run instead of ``python -m envbus``; ``serve …`` is appended. It passes SIGTERM on, best by ``exec``."""
    log_dir: Path | None = None
    """Folder for the servers' logs; default: one named as the env in the controller's."""
    env_dir_path: list[Path] = Field(default_factory=list)
    """Folders to find environments in."""
    allow_keys: list[Annotated[str, AfterValidator(_key_pair)]] = Field(default_factory=list)
    """``VARIABLE=ORIGIN`` pairs: which API keys rollouts may use, and where."""
    allow_urls: list[Annotated[str, AfterValidator(_url_pattern)]] = Field(default_factory=list)
    """Patterns of model URLs that rollouts may call without a key."""
    model_proxy: bool = False
    """Call models through the proxies that the servers' environment names."""
    log_level: LogLevel = "INFO"
    grace: float = Field(30.0, ge=0)
    """Seconds that a stop waits for running rollouts."""
    autoscale: AutoscalePolicy | None = None
    restart: RestartPolicy = RestartPolicy()
    liveness: LivenessPolicy = LivenessPolicy()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.python is not None and self.command is not None:
            raise ValueError("give python or command, not both")
        if self.autoscale is not None and "replicas" in self.model_fields_set:
            raise ValueError("give replicas or autoscale, not both")
        return self

    @property
    def bus_name(self) -> str:
        """The env's name on the bus."""
        return env_name(self.id, self.args, self.name)

    @property
    def first_replicas(self) -> int:
        """Servers to begin with."""
        return self.autoscale.min if self.autoscale is not None else self.replicas

    @property
    def digest(self) -> str:
        """Changes with everything that makes a running server out of date."""
        served = self.model_dump(
            mode="json", exclude={"replicas", "autoscale", "restart", "liveness", "log_dir"}, exclude_defaults=True
        )
        return hashlib.sha256(json.dumps(served, sort_keys=True, default=str).encode()).hexdigest()[:16]


class FleetSpec(Policy):
    """A fleet file."""

    bus: BusSpec = BusSpec()
    controller: ControllerSpec = ControllerSpec()
    env: list[EnvSpec] = Field(min_length=1)
    _source: TomlFile | None = PrivateAttr(None)
    """The file that it was read from."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        seen: dict[str, int] = {}
        for number, env in enumerate(self.env):
            try:
                Subjects(env.bus_name, self.bus.prefix)
            except UsageError as error:
                raise ValueError(f"env {number + 1} ({env.id!r}): {error}") from None
            if env.bus_name in seen:
                first = seen[env.bus_name] + 1
                raise ValueError(
                    f"env {first} and env {number + 1} are both {env.bus_name!r} on the bus; give one another name"
                )
            seen[env.bus_name] = number
        if self.controller.adopt and self.bus.embedded:
            raise ValueError("adopt needs a bus that outlives the controller: give an address instead of embedded")
        return self

    def place(self, where: Sequence[str | int]) -> str:
        """Say where a key is, as errors begin: file, line and key."""
        return key_of(where) if self._source is None else self._source.place(where)

    @property
    def controller_id(self) -> str:
        """The controller's id; always set in a spec that was read by this module."""
        assert self.controller.id is not None
        return self.controller.id


Overrides = Mapping[str, Mapping[str, Any]]
"""Table → key → value: what the command line puts over the file."""


def read_fleet_file(path: Path, *, overrides: Overrides | None = None) -> FleetSpec:
    """Read a fleet file; relative paths in it are relative to its folder.

    Raises:
        UsageError: It cannot be read, or something in it is wrong.
    """
    file = TomlFile.read(path, "fleet file")
    try:
        spec = FleetSpec.model_validate(_with(overrides or {}, file.values))
    except ValidationError as error:
        raise usage_error(error, file) from error
    spec._source = file
    return _settled(spec, folder=path.parent, default_id=f"{_host()}-{_token(path.stem)}")


def _with(overrides: Overrides, values: dict[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for table, keys in overrides.items():
        if isinstance(values.get(table, {}), dict):
            result[table] = {**values.get(table, {}), **keys}
    if {"address", "context"} & overrides.get("bus", {}).keys():
        for key in ("embedded", "port", "websocket_port", "monitoring_port"):
            result["bus"].pop(key, None)
    if "context" in overrides.get("bus", {}) and "address" not in overrides["bus"]:
        result["bus"].pop("address", None)
    return result


def fleet_of(
    env_ids: Sequence[str],
    *,
    replicas: int | None = None,
    max_concurrent: int | None = None,
    allow_keys: Sequence[str] = (),
    allow_urls: Sequence[str] = (),
    overrides: Overrides | None = None,
) -> FleetSpec:
    """Return the fleet of ``envbus up ENV_ID…``.

    Raises:
        UsageError: An argument is not usable.
    """
    given = {"replicas": replicas, "max_concurrent": max_concurrent}
    env: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    env |= {"allow_keys": list(allow_keys), "allow_urls": list(allow_urls)}
    try:
        spec = FleetSpec.model_validate(_with(overrides or {}, {"env": [{"id": env_id} | env for env_id in env_ids]}))
    except ValidationError as error:
        raise UsageError(next(problems(error))) from error  # the others are the same, of other envs
    return _settled(spec, folder=Path.cwd(), default_id=f"{_host()}-{secrets.token_hex(2)}")


def _settled(spec: FleetSpec, *, folder: Path, default_id: str) -> FleetSpec:
    controller_id = spec.controller.id or default_id
    log_dir = folder / spec.controller.log_dir.expanduser() / controller_id
    cgroup = spec.controller.cgroup.absolute() if spec.controller.cgroup is not None else None
    settled = {"id": controller_id, "log_dir": log_dir.absolute(), "cgroup": cgroup}
    controller = spec.controller.model_copy(update=settled)
    contexts = {key: _context(getattr(spec.bus, key), folder) for key in ("context", "server_context")}
    envs = [
        env.model_copy(
            update={
                "env_dir_path": [(folder / path.expanduser()).absolute() for path in env.env_dir_path],
                "python": _program(env.python, folder),
                "cwd": (folder / env.cwd.expanduser()).absolute() if env.cwd is not None else None,
                "log_dir": (folder / env.log_dir.expanduser()).absolute() if env.log_dir is not None else None,
            }
        )
        for env in spec.env
    ]
    return spec.model_copy(update={"bus": spec.bus.model_copy(update=contexts), "controller": controller, "env": envs})


def _context(context: str | None, folder: Path) -> str | None:
    """A path, which ends in .json, is relative to the folder; a name is one of the NATS CLI."""
    if context is None or not context.endswith(".json"):
        return context
    return str((folder / Path(context).expanduser()).absolute())


def _program(program: str | None, folder: Path) -> str | None:
    """A path is relative to the folder; a bare name is looked up as usual."""
    if program is None or "/" not in program:
        return program
    return str((folder / Path(program).expanduser()).absolute())


def _host() -> str:
    return _token(platform.node().partition(".")[0])[:32] or "host"


def _token(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:24]
