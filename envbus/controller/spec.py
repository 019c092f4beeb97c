"""The fleet file: what a controller runs, read from TOML and checked whole before anything starts.

Errors name the file, the key and, where it can be found, the line.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from envbus.bus.control_messages import MAX_REPLICAS
from envbus.bus.subjects import DEFAULT_PREFIX, Subjects, check_prefix, env_name
from envbus.controller.policies import AutoscalePolicy, LivenessPolicy, Policy, RestartPolicy
from envbus.errors import UsageError


def _known_prefix(prefix: str) -> str:
    try:
        return check_prefix(prefix)
    except UsageError as error:
        raise ValueError(str(error)) from None


Port = Annotated[int, Field(ge=0, le=65535)]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    Field(description="Level of the servers' logs."),
]


class BusSpec(Policy):
    """Table ``[bus]``: which NATS. Without an address: ENVBUS_URL, NATS_URL, else an embedded one."""

    address: str | None = None
    """NATS address; put secrets into ENVBUS_URL instead."""
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
        if self.address is not None and (self.port or self.websocket_port or self.monitoring_port):
            raise ValueError("ports are those of the embedded NATS server; they do not go with an address")
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


class EnvSpec(Policy):
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
    allow_keys: list[str] = Field(default_factory=list)
    """``VARIABLE=ORIGIN`` pairs: which API keys rollouts may use, and where."""
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
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the fleet file {path}: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    try:
        spec = FleetSpec.model_validate(_with(overrides or {}, values))
    except ValidationError as error:
        raise UsageError("\n    ".join(_problems(path, text, error))) from error
    return _settled(spec, folder=path.parent, default_id=f"{_host()}-{_token(path.stem)}")


def _with(overrides: Overrides, values: dict[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for table, keys in overrides.items():
        if isinstance(values.get(table, {}), dict):
            result[table] = {**values.get(table, {}), **keys}
    if "address" in overrides.get("bus", {}):
        for key in ("embedded", "port", "websocket_port", "monitoring_port"):
            result["bus"].pop(key, None)
    return result


def fleet_of(
    env_ids: Sequence[str],
    *,
    replicas: int | None = None,
    max_concurrent: int | None = None,
    overrides: Overrides | None = None,
) -> FleetSpec:
    """Return the fleet of ``envbus up ENV_ID…``.

    Raises:
        UsageError: An argument is not usable.
    """
    given = {"replicas": replicas, "max_concurrent": max_concurrent}
    env = {key: value for key, value in given.items() if value is not None}
    try:
        spec = FleetSpec.model_validate(_with(overrides or {}, {"env": [{"id": env_id} | env for env_id in env_ids]}))
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        raise UsageError(f"{_key(detail['loc'])}{_message(detail)}") from error
    return _settled(spec, folder=Path.cwd(), default_id=f"{_host()}-{secrets.token_hex(2)}")


def _settled(spec: FleetSpec, *, folder: Path, default_id: str) -> FleetSpec:
    controller_id = spec.controller.id or default_id
    log_dir = folder / spec.controller.log_dir.expanduser() / controller_id
    controller = spec.controller.model_copy(update={"id": controller_id, "log_dir": log_dir.absolute()})
    envs = [
        env.model_copy(
            update={
                "env_dir_path": [(folder / path.expanduser()).absolute() for path in env.env_dir_path],
                "python": _program(env.python, folder),
                "log_dir": (folder / env.log_dir.expanduser()).absolute() if env.log_dir is not None else None,
            }
        )
        for env in spec.env
    ]
    return spec.model_copy(update={"controller": controller, "env": envs})


def _program(program: str | None, folder: Path) -> str | None:
    """A path is relative to the folder; a bare name is looked up as usual."""
    if program is None or "/" not in program:
        return program
    return str((folder / Path(program).expanduser()).absolute())


def _host() -> str:
    return _token(platform.node().partition(".")[0])[:32] or "host"


def _token(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:24]


def _problems(path: Path, text: str, error: ValidationError) -> Iterator[str]:
    for detail in error.errors(include_url=False, include_input=False):
        where = [part for part in detail["loc"] if part != "function-after"]
        line = _line_of(text, where)
        place = f"{path}:{line}" if line else str(path)
        yield f"{place}: {_key(where)}{_message(detail)}"


def _message(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "extra_forbidden":
        return "unknown key"
    if detail["type"] == "missing":
        return "is missing"
    return str(detail["msg"]).removeprefix("Value error, ")


def _key(where: Sequence[str | int]) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return f"{text}: " if text else ""


def _line_of(text: str, where: Sequence[str | int]) -> int | None:
    """The line of a key: that which begins with it, in its table; the table's own line if it is not found."""
    if not where:
        return None
    table, place = str(where[0]), where[1] if len(where) > 1 and isinstance(where[1], int) else 0
    keys = [part for part in where[1:] if isinstance(part, str)]
    header = re.compile(rf"^\s*\[+\s*{re.escape(table)}\s*\]+")
    found: int | None = None
    inside = -1
    for number, line in enumerate(text.splitlines(), start=1):
        if header.match(line):
            inside += 1
            found = number if inside == place else found
        elif inside == place and keys and any(re.match(rf'\s*"?{re.escape(key)}"?\s*=', line) for key in keys):
            return number
        elif inside == place and keys and re.match(rf"^\s*\[+.*\b{re.escape(keys[0])}\s*\]", line):
            found = number
    return found
