"""Where NATS is and as whom to connect: from arguments, the environment, or a NATS CLI context.

Pure but for reading files. Secrets live in SecretStr, addresses hold no userinfo,
and no error, repr or log text of this module shows a secret.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_validator, model_validator

from envbus.errors import UsageError

DEFAULT_INBOX_PREFIX = "_INBOX"
_DEFAULT_PORTS = {"nats": 4222, "tls": 4222, "ws": 80, "wss": 443}
_WEBSOCKET_SCHEMES = {"ws", "wss"}
_TLS_SCHEMES = {"tls", "wss"}
_HOST_PORT_PATH = re.compile(r"(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(?P<path>/[\w./-]*)?")
_INBOX = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_CREDENTIALS = {"user", "password", "token", "creds_file", "nkey_seed", "nkey_seed_file"}
_FILES = {"creds_file", "nkey_seed_file", "tls_ca_file", "tls_cert_file", "tls_key_file"}
_CONTEXT_CREDENTIALS = {"user": "user", "creds": "creds_file", "nkey": "nkey_seed_file", "token": "token"}
_CONTEXT_KEYS = {
    "inbox_prefix": "inbox_prefix",
    "ca": "tls_ca_file",
    "cert": "tls_cert_file",
    "key": "tls_key_file",
    "tls_first": "tls_handshake_first",
}
_Fields = dict[str, Any]
_HOW_TO_SET = (
    "no NATS address: give one (--address nats://host:4222), set ENVBUS_URL or NATS_URL, "
    "or select a NATS CLI context (nats context select)"
)


class BusOptions(BaseModel):
    """How to connect to NATS. Equal options may share a connection.

    At most one kind of credentials: user and password, token, creds file, or nkey seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    servers: tuple[str, ...]
    """Normalised: scheme, host and port, without userinfo."""
    user: str | None = None
    password: SecretStr | None = None
    token: SecretStr | None = None
    creds_file: Path | None = None
    """A .creds file: JWT and nkey seed."""
    nkey_seed: SecretStr | None = None
    nkey_seed_file: Path | None = None
    context_file: Path | None = None
    """The NATS CLI context that user and password, or the token, come from: read again for every connection."""
    inbox_prefix: str = DEFAULT_INBOX_PREFIX
    """Reply subjects start with it; set it to what this NATS user may subscribe to."""
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_handshake_first: bool = False
    """Speak TLS before NATS's greeting; the NATS server must be set up the same way."""

    @field_validator("servers")
    @classmethod
    def _normalise_servers(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        if any("@" in server for server in servers):
            raise ValueError("servers must not hold credentials; use the fields user, password or token")
        return tuple(_normalise(server, shown=server) for server in servers)

    @field_validator("inbox_prefix")
    @classmethod
    def _check_inbox_prefix(cls, prefix: str) -> str:
        if not _INBOX.fullmatch(prefix):
            raise ValueError(
                f"inbox prefix {prefix!r} is not a subject; give it without wildcards, e.g. _INBOX_trainer"
            )
        return prefix

    @field_validator("creds_file", "nkey_seed_file", "tls_ca_file", "tls_cert_file", "tls_key_file")
    @classmethod
    def _check_file(cls, file: Path | None) -> Path | None:
        if file is None:
            return None
        file = file.expanduser()
        _read(file)
        return file

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        schemes = self._schemes()
        if not schemes:
            raise ValueError("no address")
        if len(schemes) > 1:
            raise ValueError(f"addresses mix {' and '.join(sorted(schemes))}; use one scheme for all")
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password must be given together")
        kinds = {"user": self.user, "token": self.token, "creds file": self.creds_file}
        kinds |= {"nkey seed": self.nkey_seed, "nkey seed file": self.nkey_seed_file}
        given = [kind for kind, value in kinds.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"several kinds of credentials: {', '.join(given)}; give one")
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ValueError("a TLS key file needs a TLS certificate file")
        if self.requires_tls and "ws" in schemes:
            raise ValueError("TLS settings need a wss:// address, not ws://")
        self._check_secret_files()
        return self

    def _check_secret_files(self) -> None:
        # nats-py reads these while it connects: it spins for ever over a creds file without a JWT.
        if self.creds_file is not None:
            text = _read(self.creds_file)
            if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
                raise ValueError(f"{self.creds_file} is not a NATS creds file")
        seed = self.nkey_seed.get_secret_value() if self.nkey_seed is not None else None
        if self.nkey_seed_file is not None:
            seed = _read(self.nkey_seed_file)
        if seed is not None and not re.fullmatch(r"SU[A-Z2-7]{56}", seed.strip()):
            raise ValueError(f"{self.nkey_seed_file or 'nkey_seed'} is not the nkey seed of a user (SU…)")

    @property
    def requires_tls(self) -> bool:
        """Whether this connection must be encrypted: a tls:// or wss:// address, or any TLS setting."""
        settings = (self.tls_ca_file, self.tls_cert_file, self.tls_handshake_first)
        return bool(self._schemes() & _TLS_SCHEMES) or any(settings)

    def _schemes(self) -> set[str]:
        return {server.partition(":")[0] for server in self.servers}

    def describe(self) -> str:
        """Return the addresses for logs and errors; there is no secret in them."""
        return ", ".join(self.servers)

    def nats_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of ``nats.connect`` that these options stand for.

        nats-py 2.16 speaks in clear, even to a ``tls://`` address, when the NATS server's greeting
        offers no TLS, and whoever sits between can strip that offer. So when TLS is required, the
        credentials are given as functions: nats-py calls them when it has the greeting and the
        handshake behind it and is about to send CONNECT; they raise ``ssl.SSLError`` instead if that
        connection made no handshake, and nothing is sent. Ordinary servers, which greet before the
        handshake, work.

        Raises:
            UsageError: A TLS file does not hold what it should.
        """
        if self.context_file is not None:
            return self._as_its_context_says().nats_kwargs()
        kwargs: dict[str, Any] = {"servers": list(self.servers), "inbox_prefix": self.inbox_prefix}
        if self.user is not None and self.password is not None:
            kwargs |= {"user": self.user, "password": self.password.get_secret_value()}
        if self.token is not None:
            kwargs["token"] = self.token.get_secret_value()
        if self.creds_file is not None:
            kwargs["user_credentials"] = str(self.creds_file)
        if self.nkey_seed is not None:
            kwargs["nkeys_seed_str"] = self.nkey_seed.get_secret_value()
        if self.nkey_seed_file is not None:
            kwargs["nkeys_seed"] = str(self.nkey_seed_file)
        if self.requires_tls:
            kwargs |= self._tls_kwargs(kwargs)
        return kwargs

    def _as_its_context_says(self) -> BusOptions:
        """With the credentials that the context has now: they may have been renewed."""
        assert self.context_file is not None
        named = _named_context(str(self.context_file))
        renewed = {name: value for name, value in named.items() if name in _CREDENTIALS}
        kept = {name: value for name, value in self if name not in _CREDENTIALS | {"context_file"}}
        return BusOptions(**kept, **renewed)

    def _tls_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        context = _HandshakeContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.tls_ca_file is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(self.tls_ca_file)
            if self.tls_cert_file is not None:
                # An empty passphrase makes an encrypted key an error, not a question on the terminal.
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file, password="")
        except OSError as error:
            files = [str(file) for file in (self.tls_ca_file, self.tls_cert_file, self.tls_key_file) if file]
            raise UsageError(f"TLS files {', '.join(files)}: {error.strerror or error}") from error
        # Asked for on every kind of credentials; NATS takes an empty token for none.
        asked = "password" if "password" in kwargs else "token"
        secret = kwargs.get(asked, "")
        guarded = {"tls": context, "tls_handshake_first": self.tls_handshake_first}
        if "wss" in self._schemes():
            return guarded  # TLS from the first byte
        return guarded | {asked: context.only_after_handshake(secret)}


class _HandshakeContext(ssl.SSLContext):
    """An SSL context that knows whether its latest connection completed the handshake."""

    _latest: ssl.SSLObject | None = None

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        self._latest = super().wrap_bio(*args, **kwargs)
        return self._latest

    def only_after_handshake(self, secret: str) -> Callable[[], str]:
        def reveal() -> str:
            # A handshake counts for one CONNECT: the next connection must make its own.
            latest, self._latest = self._latest, None
            if latest is None or latest.version() is None:
                raise ssl.SSLError("TLS is required, but the NATS server offers none; nothing was sent to it")
            return secret

        return reveal


class BusArguments(TypedDict, total=False):
    """What may be given beside an address; None counts as not given."""

    user: str | None
    """With ``password``."""
    password: str | SecretStr | None
    token: str | SecretStr | None
    creds_file: str | Path | None
    """A NATS .creds file."""
    nkey_seed_file: str | Path | None
    """A file with the nkey seed of a user."""
    inbox_prefix: str | None
    """Prefix of reply subjects, for users that may not subscribe to ``_INBOX.>``."""


def resolve_bus_options(
    address: str | Sequence[str] | BusOptions | None = None,
    *,
    context: str | None = None,
    **arguments: Unpack[BusArguments],
) -> BusOptions:
    """Find out how to connect to NATS.

    The first of these decides: ``address`` or ``context``; ENVBUS_URL; NATS_URL; ENVBUS_CONTEXT; the
    context that the NATS CLI has selected.

    Args:
        address: One address, a comma-separated list, several, or finished options. ``nats://``
            and port 4222 are the defaults; userinfo is ``user:password@`` or ``token@``.
        context: Name of a NATS CLI context, or path of one (it ends in .json; files named in it are relative to its
            folder); with an address, only its other settings are used.
        **arguments: See BusArguments. Credentials replace those of the address or context.

    Raises:
        UsageError: No address, or something about it is wrong; never shows a secret.
    """
    layers = _named_layers(address, context) or _selected_layers()
    if not layers:
        raise UsageError(_HOW_TO_SET)
    return _build([*layers, _given(arguments)])


def find_bus_options(
    address: str | Sequence[str] | BusOptions | None = None,
    *,
    context: str | None = None,
    **arguments: Unpack[BusArguments],
) -> BusOptions | None:
    """Like resolve_bus_options(), but None when neither arguments nor environment name an address or context.

    The context that the NATS CLI has selected does not count: it may be meant for other things.

    Raises:
        UsageError: Something about the address is wrong, or credentials are given without one.
    """
    layers = _named_layers(address, context)
    given = _given(arguments)
    if layers:
        return _build([*layers, given])
    if given:
        raise UsageError(f"{', '.join(given)} given, but {_HOW_TO_SET}")
    return None


def _given(arguments: BusArguments) -> _Fields:
    return {name: value for name, value in arguments.items() if value is not None}


def _named_layers(address: str | Sequence[str] | BusOptions | None, context: str | None) -> list[_Fields]:
    layers = [_named_context(context)] if context else []
    if isinstance(address, BusOptions):
        return [*layers, {name: value for name, value in address if value is not None}]
    if address:
        return [*layers, _address_fields(address)]
    if layers:
        return layers
    url = os.environ.get("ENVBUS_URL") or os.environ.get("NATS_URL")
    if url:
        return [_address_fields(url)]
    name = os.environ.get("ENVBUS_CONTEXT")
    return [_named_context(name)] if name else []


def _selected_layers() -> list[_Fields]:
    try:
        name = (_cli_directory() / "context.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [_named_context(name)] if name else []


def _build(layers: list[_Fields]) -> BusOptions:
    """Later layers win; credentials of a layer replace all earlier ones."""
    fields: _Fields = {}
    for layer in layers:
        if _CREDENTIALS & layer.keys():
            fields = {name: value for name, value in fields.items() if name not in _CREDENTIALS | {"context_file"}}
        fields |= layer
    try:
        return BusOptions(**fields)
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors(include_input=False, include_url=False)]
    raise UsageError(f"NATS address: {'; '.join(problems)}")


def _problem(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"


def _address_fields(address: str | Sequence[str]) -> _Fields:
    joined = address if isinstance(address, str) else ",".join(address)
    texts = [text.strip() for text in joined.split(",") if text.strip()]
    if not texts:
        raise UsageError(_HOW_TO_SET)
    servers, userinfos = [], []
    for number, text in enumerate(texts, start=1):
        scheme, separator, rest = text.partition("://")
        userinfo, at, host = (rest if separator else text).rpartition("@")
        userinfos.append(userinfo if at else None)
        if "@" not in joined:
            shown = text.partition("?")[0]
        else:  # a piece without @ may be part of a password with a comma
            shown = f"…@{host.partition('?')[0]}" if len(texts) == 1 else f"address {number} of {len(texts)}"
        try:
            servers.append(_normalise(f"{scheme}://{host}" if separator else host, shown=shown))
        except ValueError as error:
            raise UsageError(f"NATS address {error}") from None
    return {"servers": tuple(servers)} | _userinfo_fields(userinfos)


def _userinfo_fields(userinfos: list[str | None]) -> _Fields:
    first = userinfos[0]
    if any(other is not None and other != first for other in userinfos) or any(c in (first or "") for c in "/?#"):
        raise UsageError(
            "NATS address: credentials must be the same in all addresses, or in the first only; "
            "in a password write , / ? # @ as %2C %2F %3F %23 %40"
        )
    if first is None:
        return {}
    user, colon, password = first.partition(":")
    if not colon:
        return {"token": unquote(user)}
    return {"user": unquote(user), "password": unquote(password)}


def _normalise(server: str, *, shown: str) -> str:
    scheme, separator, rest = server.partition("://")
    if not separator:
        scheme, rest = "nats", server
    scheme = scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise ValueError(f"{shown}: its scheme is not one of NATS; use nats:// or tls:// (or ws://, wss://)")
    match = _HOST_PORT_PATH.fullmatch(rest)
    if match is None:
        raise ValueError(f"{shown}: not of the form nats://host:port")
    port = int(match["port"] or _DEFAULT_PORTS[scheme])
    if not 0 < port < 65536:
        raise ValueError(f"{shown}: the port must be 1 to 65535")
    path = (match["path"] or "").rstrip("/")
    if path and scheme not in _WEBSOCKET_SCHEMES:
        raise ValueError(f"{shown}: a NATS address has no path")
    return f"{scheme}://{match['host'].lower()}:{port}{path}"


def _cli_directory() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "nats"


def _context_file(name: str) -> Path:
    """Where a context is: a path as it is, a name in the NATS CLI's folder."""
    if name.endswith(".json"):
        return Path(name).expanduser().absolute()
    directory = _cli_directory() / "context"
    file = directory / f"{name}.json"
    if "/" in name or ".." in name or not file.is_file():
        known = ", ".join(sorted(file.stem for file in directory.glob("*.json"))) or "none"
        raise UsageError(
            f"no NATS CLI context {name!r} in {directory} (there are: {known}); the path of one ends in .json"
        )
    return file


def _named_context(name: str) -> _Fields:
    file = _context_file(name)
    fields = _context_fields(file)
    if name.endswith(".json"):
        fields |= {field: file.parent / Path(str(fields[field])).expanduser() for field in _FILES & fields.keys()}
    return fields | ({"context_file": file} if {"password", "token"} & fields.keys() else {})


def _context_fields(file: Path) -> _Fields:
    """Read a context of the NATS CLI, with its order of credentials: user, creds, nkey, token."""
    try:
        settings = json.loads(_read(file))
    except ValueError as error:
        if str(error).startswith("cannot read"):
            raise UsageError(f"NATS CLI context: {error}") from None
        raise UsageError(f"{file} is not a NATS CLI context: not a JSON object") from None
    if not isinstance(settings, dict):
        raise UsageError(f"{file} is not a NATS CLI context: not a JSON object")
    for key in ("nsc", "socks_proxy", "user_jwt"):
        if settings.get(key):
            raise UsageError(f"NATS CLI context {file.stem!r} uses {key!r}, which envbus does not support; use creds")
    fields = _address_fields(settings.get("url") or "nats://127.0.0.1:4222")
    fields |= {field: settings[key] for key, field in _CONTEXT_KEYS.items() if settings.get(key)}
    for key, field in _CONTEXT_CREDENTIALS.items():
        if settings.get(key):
            fields = {name: value for name, value in fields.items() if name not in _CREDENTIALS}
            fields |= {field: settings[key]} | ({"password": settings.get("password", "")} if key == "user" else {})
            break
    return fields


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
