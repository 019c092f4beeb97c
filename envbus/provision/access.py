"""The access file: who is on the bus and as what, read from TOML and checked whole.

Errors name the file, the key and, where it can be found, the line. Nothing secret is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from envbus.bus.address import DEFAULT_INBOX_PREFIX, BusOptions
from envbus.bus.subjects import DEFAULT_PREFIX, check_prefix, encode_token
from envbus.errors import UsageError
from envbus.toml_file import TomlFile, message, usage_error

Role = Literal["server", "trainer", "operator", "controller", "dashboard"]
_USER_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
KIB = 1024
MIB = 1024 * KIB


def _usable_prefix(prefix: str) -> str:
    try:
        return check_prefix(prefix)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _usable_env(name: str) -> str:
    try:
        encode_token(name)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return name


def _usable_user(name: str) -> str:
    if not _USER_NAME.fullmatch(name):
        raise ValueError(f"user {name!r}: a name is 1 to 32 letters, digits, '-' and '_'")
    return name


UserName = Annotated[str, AfterValidator(_usable_user)]
EnvName = Annotated[str, AfterValidator(_usable_env)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Table(BaseModel):
    """Base of the tables: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Details(Table):
    """Table ``[user.NAME]``: what one user may do beyond its role, or less."""

    envs: list[EnvName] | None = None
    """Servers and trainers: only these envs, by their names on the bus. Default: all."""
    beats: bool = True
    """Trainers: may read heartbeats, which say who is there and how busy it is."""
    calls: bool = False
    """Operators: may run rollouts, too (``envbus call``)."""
    controller_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    """Controllers: the ``id`` in the fleet file. Default: the user's name."""
    websocket: bool = False
    """May connect by WebSocket, too. Dashboards may without this."""


class Listen(Table):
    """Table ``[listen]``: where NATS listens."""

    host: str = Field("0.0.0.0", pattern=r"^[\w.:\[\]-]+$")
    port: Port = 4222
    websocket_port: Port | None = None
    """For dashboards in a browser. Default: no WebSocket."""
    monitoring_port: Port | None = None
    """On loopback only: NATS asks nobody there for credentials. Default: none."""


class Tls(Table):
    """Table ``[tls]``: certificates, both ways."""

    certificates: Annotated[Path, Field(strict=False)]
    """Folder as ``envbus nats certs`` makes it."""
    server_path: Annotated[str, Field(pattern=r'^[^"\n]+$')] | None = None
    """Where the NATS server will find that folder, e.g. inside a container. Default: where it is."""
    handshake_first: bool = False
    """TLS before NATS's greeting: nothing is said in clear. All clients must be set up for it."""


class Limits(Table):
    """Table ``[limits]``: what one connection or trainer may take from the others."""

    max_connections: int = Field(4096, ge=1)
    max_subscriptions: int = Field(1000, ge=50)
    """Of one connection."""
    max_payload_bytes: int = Field(1 * MIB, ge=64 * KIB, le=64 * MIB)
    max_pending_bytes: int = Field(64 * MIB, ge=8 * MIB)
    """What NATS keeps for a connection that reads slowly before it cuts it."""
    write_deadline_s: int = Field(10, ge=1, le=300)
    reply_window_s: int = Field(4 * 3600, ge=1)
    """With accounts: how long after a plain request a server may answer it. envbus's clients ask again for what comes
    later. NATS keeps 1 KB for each request so long."""
    trainer_connections: int = Field(64, ge=1)
    """Of one trainer, with accounts."""
    trainer_subscriptions: int = Field(5000, ge=50)
    """Of all connections of one trainer, with accounts."""


@dataclass(frozen=True, slots=True)
class User:
    """One user of the bus."""

    name: str
    role: Role
    details: Details

    @property
    def inbox_prefix(self) -> str:
        """Only this user hears what is sent there."""
        return f"{DEFAULT_INBOX_PREFIX}_{self.name}"

    @property
    def may_use_websocket(self) -> bool:
        """Whether it may connect by WebSocket."""
        return self.role == "dashboard" or self.details.websocket


_OF_ROLES: Mapping[str, tuple[Role, ...]] = {
    "envs": ("server", "trainer"),
    "beats": ("trainer",),
    "calls": ("operator",),
    "controller_id": ("controller",),
}
"""Details that only some roles have."""


class AccessSpec(Table):
    """An access file."""

    accounts: bool = False
    """An account per trainer: trainers share no subject space. Default: one account, told apart by permissions."""
    credentials: Literal["nkeys", "passwords"] = "nkeys"
    prefix: Annotated[str, AfterValidator(_usable_prefix)] = DEFAULT_PREFIX
    """First token of all subjects."""
    url: str | None = None
    """Address of NATS as clients see it. Default: this host's loopback."""
    servers: list[UserName] = Field(default_factory=list)
    trainers: list[UserName] = Field(default_factory=list)
    operators: list[UserName] = Field(default_factory=list)
    controllers: list[UserName] = Field(default_factory=list)
    dashboards: list[UserName] = Field(default_factory=list)
    user: dict[UserName, Details] = Field(default_factory=dict)
    listen: Listen = Listen()
    tls: Tls | None = None
    limits: Limits = Limits()

    @property
    def users(self) -> list[User]:
        """All of them, by role."""
        return [User(name, role, self.user.get(name, Details())) for role, name in self._names()]

    def of_role(self, *roles: Role) -> list[User]:
        """Those of these roles."""
        return [user for user in self.users if user.role in roles]

    @property
    def client_url(self) -> str:
        """What contexts have as their address."""
        scheme = "nats" if self.tls is None else "tls"
        return self.url or f"{scheme}://127.0.0.1:{self.listen.port}"

    def _names(self) -> Iterator[tuple[Role, str]]:
        yield from (("server", name) for name in self.servers)
        yield from (("trainer", name) for name in self.trainers)
        yield from (("operator", name) for name in self.operators)
        yield from (("controller", name) for name in self.controllers)
        yield from (("dashboard", name) for name in self.dashboards)

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        names = [name for _, name in self._names()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"user {twice[0]!r} is named twice; a user has one role, give each a name of its own")
        if not self.servers or not self.trainers:
            raise ValueError("name at least one of servers and one of trainers")
        for name in self.user:
            if name not in names:
                raise ValueError(f"user.{name}: no such user; name it in servers, trainers, operators, …")
        for user in self.users:
            for key in sorted(user.details.model_fields_set & _OF_ROLES.keys()):
                if user.role not in _OF_ROLES[key]:
                    raise ValueError(f"user.{user.name}.{key}: means nothing for a {user.role}")
        return self

    @model_validator(mode="after")
    def _address_fits(self) -> Self:
        try:
            options = BusOptions(servers=tuple(part.strip() for part in self.client_url.split(",")))
        except ValidationError as error:
            raise ValueError(f"url: {message(error.errors(include_url=False)[0])}") from None
        if self.tls is not None and not options.requires_tls:
            raise ValueError("url: with certificates it must be a tls:// address")
        if self.tls is None and options.requires_tls:
            raise ValueError("url: a tls:// address needs the table [tls] with certificates")
        ports = [port for _, port in self.listen if isinstance(port, int)]
        if len(set(ports)) < len(ports):
            raise ValueError("listen: the ports must differ")
        return self


def read_access_file(path: Path, *, overrides: Mapping[str, Any] | None = None) -> AccessSpec:
    """Read an access file; relative paths in it are relative to its folder.

    Args:
        overrides: Keys that replace those of the file, also in its tables.

    Raises:
        UsageError: It cannot be read, or something in it is wrong.
    """
    file = TomlFile.read(path, "access file")
    try:
        spec = AccessSpec.model_validate(file.values)
    except ValidationError as error:
        raise usage_error(error, file) from error
    return _changed(_settled(spec, folder=path.parent), overrides or {})


def access_of(
    *,
    trainers: Sequence[str],
    servers: Sequence[str],
    operators: Sequence[str] = (),
    controllers: Sequence[str] = (),
    dashboards: Sequence[str] = (),
    **others: Any,
) -> AccessSpec:
    """Return the access of these users; ``others`` are further keys of an access file.

    Raises:
        UsageError: Something is wrong with them.
    """
    lists = {"trainers": trainers, "servers": servers, "operators": operators}
    lists |= {"controllers": controllers, "dashboards": dashboards}
    return _checked({name: list(users) for name, users in lists.items()} | others)


def _checked(values: Mapping[str, Any]) -> AccessSpec:
    try:
        return AccessSpec.model_validate(values)
    except ValidationError as error:
        raise usage_error(error) from error


def _changed(spec: AccessSpec, overrides: Mapping[str, Any]) -> AccessSpec:
    if not overrides:
        return spec
    values = spec.model_dump(exclude_unset=True)
    for key, value in overrides.items():
        values[key] = values.get(key, {}) | value if isinstance(value, Mapping) else value
    return _checked(values)


def _settled(spec: AccessSpec, *, folder: Path) -> AccessSpec:
    if spec.tls is None:
        return spec
    certificates = (folder / spec.tls.certificates.expanduser()).absolute()
    return spec.model_copy(update={"tls": spec.tls.model_copy(update={"certificates": certificates})})
