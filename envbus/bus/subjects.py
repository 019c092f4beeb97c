"""The subjects of envbus: spelled and parsed here and nowhere else.

An env's name is one token: percent-encoded where NATS forbids a character,
at most 128 bytes. The encoding is reversible, so no two names share a subject.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from envbus.errors import UsageError

MAX_TOKEN_BYTES = 128
WORK_QUEUE = "workers"
"""The queue group of everything that any one server may answer."""
DEFAULT_PREFIX = "env"
DISCOVERY = "$SRV"
"""First token of the subjects on which micro services are discovered; NATS's own, under any prefix."""
_SAFE = "-_~@+=!$,"


def env_name(env_id: str, env_args: Mapping[str, Any] | None = None, name: str | None = None) -> str:
    """Return the name of an env on the bus.

    Args:
        env_id: As given to load_environment, e.g. ``"owner/my-env"``.
        env_args: Arguments of load_environment. Differently configured servers never share a queue.
        name: Overrides the rule.

    Returns:
        ``name`` if given, ``env_id`` without arguments, else ``env_id~`` and 8 hex digits of their canonical form.

    Raises:
        UsageError: The name is empty, or the arguments are not JSON values.
    """
    if name is not None:
        if not name:
            raise UsageError("an env's name must not be empty")
        return name
    if not env_id:
        raise UsageError("env_id must not be empty")
    if "~" in env_id:
        raise UsageError(
            f"env_id {env_id!r}: '~' is kept for the digest of arguments; to use servers of that name give "
            f"{env_id.partition('~')[0]!r} and name= (--name {env_id}); for one of your own give another name="
        )
    if not env_args:
        return env_id
    return f"{env_id}~{args_digest(env_args)}"


def args_digest(env_args: Mapping[str, Any]) -> str:
    """Return 8 hex digits of the arguments' canonical JSON form (sorted keys, no spaces)."""
    try:
        canonical = json.dumps(env_args, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"env_args must be JSON values to name an env by them ({error}); or give name=") from error
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def encode_token(name: str) -> str:
    """Encode a name as one subject token.

    Raises:
        UsageError: The token is empty or longer than 128 bytes.
    """
    token = quote(name, safe=_SAFE, errors="surrogatepass").replace(".", "%2E")
    if not 0 < len(token) <= MAX_TOKEN_BYTES:
        raise UsageError(f"{name!r} makes a subject token of {len(token)} bytes; it must be 1 to {MAX_TOKEN_BYTES}")
    return token


def decode_token(token: str) -> str | None:
    """Return the name that a token encodes; None if it encodes none, as anybody may send."""
    try:
        return unquote(token, errors="surrogatepass")
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one env under one prefix.

    Attributes:
        env: The env's name, not encoded.
        prefix: First token of every subject; one bus can carry several fleets.
    """

    env: str
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        encode_token(self.env)
        check_prefix(self.prefix)

    @property
    def _base(self) -> str:
        return f"{self.prefix}.{encode_token(self.env)}"

    @property
    def rollout(self) -> str:
        """Client to any server: run a rollout or a group."""
        return f"{self._base}.rollout"

    @property
    def info(self) -> str:
        """Client to any server: what the env is."""
        return f"{self._base}.info"

    @property
    def examples(self) -> str:
        """Client to any server: a page of the eval set."""
        return f"{self._base}.examples"

    @property
    def wait(self) -> str:
        """Client to all servers: jobs that wait."""
        return f"{self._base}.wait"

    @property
    def ctl_all(self) -> str:
        """Operator to all servers of the env."""
        return f"{self._base}.ctl.all"

    def server(self, server_id: str) -> str:
        """Client to one server."""
        return f"{self._base}.server.{server_id}"

    def ctl(self, server_id: str) -> str:
        """Operator to one server."""
        return f"{self._base}.ctl.{server_id}"

    def beat(self, server_id: str) -> str:
        """One server's heartbeat."""
        return f"{self._base}.beat.{server_id}"

    @property
    def gone(self) -> str:
        """Controller to all clients of the env: a server's process has ended."""
        return f"{self._base}.gone"

    @property
    def beats(self) -> str:
        """All heartbeats of the env."""
        return f"{self._base}.beat.*"


@dataclass(frozen=True, slots=True)
class AllEnvs(Subjects):
    """Patterns for the same subjects of every env under a prefix; for every id: ``server("*")``."""

    env: str = "*"

    @property
    def _base(self) -> str:
        return f"{self.prefix}.*"


def check_prefix(prefix: str) -> str:
    """Return the prefix.

    Raises:
        UsageError: It is not a plain subject: tokens of letters, digits, ``-`` and ``_`` joined by dots.
    """
    tokens = prefix.split(".")
    if not all(token and all(c.isascii() and (c.isalnum() or c in "-_") for c in token) for token in tokens):
        raise UsageError(f"prefix {prefix!r}: use letters, digits, '-' and '_', tokens joined by dots")
    return prefix


def controller(controller_id: str, prefix: str = DEFAULT_PREFIX) -> str:
    """Operator to one controller."""
    return f"{check_prefix(prefix)}ctl.{controller_id}"


def controller_beat(controller_id: str, prefix: str = DEFAULT_PREFIX) -> str:
    """One controller's heartbeat."""
    return f"{check_prefix(prefix)}ctl.beat.{controller_id}"


def all_controller_beats(prefix: str = DEFAULT_PREFIX) -> str:
    """Heartbeats of every controller under a prefix."""
    return f"{check_prefix(prefix)}ctl.beat.*"


def all_beats(prefix: str = DEFAULT_PREFIX) -> str:
    """Heartbeats of every env under a prefix."""
    return f"{check_prefix(prefix)}.*.beat.*"


def all_gone(prefix: str = DEFAULT_PREFIX) -> str:
    """Ends of server processes, of every env under a prefix."""
    return f"{check_prefix(prefix)}.*.gone"


def all_discovery() -> str:
    """Everything that is asked of micro services."""
    return f"{DISCOVERY}.>"


def parse_beat(subject: str, prefix: str = DEFAULT_PREFIX) -> tuple[str, str] | None:
    """Return ``(env name, server id)`` of a heartbeat's subject, or None if it is not one."""
    if not subject.startswith(prefix + "."):
        return None
    match subject[len(prefix) + 1 :].split("."):
        case [token, "beat", server_id] if (env := decode_token(token)) is not None:
            return env, server_id
    return None


def parse_gone(subject: str, prefix: str = DEFAULT_PREFIX) -> str | None:
    """Return the env of the subject on which ends of its servers are told, or None if it is not one."""
    if not subject.startswith(prefix + "."):
        return None
    match subject[len(prefix) + 1 :].split("."):
        case [token, "gone"]:
            return decode_token(token)
    return None
