"""The wire messages: one pydantic model per kind, packed as one msgpack map each.

Every map has ``v`` (protocol version) and ``t`` (kind). Bodies are opaque bytes
here, so that reading an envelope never touches a rollout's tokens. Unknown
fields are ignored; an unknown version is refused by name. See docs/protocol.md.
"""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from envbus.bus.codec import Limits, decode_map, encode
from envbus.errors import BadRequestError, DecodeError, ProtocolVersionError

PROTOCOL_VERSION = 1
WIRE_LIMITS = Limits(max_bytes=64 * 1024 * 1024, max_depth=64, max_nodes=1_000_000)
"""NATS itself carries at most 64 MiB in one message."""

Id = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
"""A job, client or server id: ``secrets.token_hex(16)`` of ours, any such token of others."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
Encoding = Literal["", "zstd"]
INT64_MAX = 2**63 - 1
Int = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
# Without these two, the list of what is wrong with a million wrong items takes 500 MB and stops the bus thread.
Ids = Annotated[list[Id], FailFast()]
MAX_WAITING = 2**31 - 1
"""Jobs that one client may say wait: sums of these are still numbers that all can read."""
MAX_ENTRIES = 1_000
"""Of a map that is not bounded otherwise."""
Counts = Annotated[dict[str, Int], Field(max_length=MAX_ENTRIES)]
Texts = Annotated[dict[str, str], Field(max_length=MAX_ENTRIES)]
ProgressHere = tuple[Id, Int, Count, Count]
"""A job, its attempt, and the last number of its progress messages that its caller has taken, and that is here: all
before it are, too."""
ProgressTotal = tuple[Id, Count]
"""A job, and how many progress messages it sent."""


_KINDS: dict[str, type[WireMessage]] = {}


class WireMessage(BaseModel):
    """Base of all wire messages."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    kind: ClassVar[str]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        _KINDS[cls.kind] = cls


class Parts(BaseModel):
    """A body that travels in parts instead of on its message."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    size: Count
    """Bytes of the encoded body."""
    parts: int = Field(ge=1, le=INT64_MAX)
    part_bytes: int = Field(ge=1, le=INT64_MAX)
    """Bytes of each part but the last."""
    checksum: Count
    """CRC-32 of the encoded body."""
    encoding: Encoding = ""
    raw_size: Count
    """Bytes after decompression."""


# ---- client to server


class Run(WireMessage):
    """Run a job: pushed to the queue group, or straight to the server that granted."""

    kind = "run"
    job: Id
    attempt: int = Field(ge=1, le=INT64_MAX)
    client: Id
    call: Literal["rollout", "group"]
    size: int = Field(ge=1, le=100_000)
    """Slots that the job takes: 1, or the group's size."""
    start_by: float | None = None
    """Seconds since the epoch after which the job must not start."""
    fingerprint: str | None = None
    """Refuse if the server's differs."""
    grant: str | None = None
    encoding: Encoding = ""
    body: bytes | None = None
    """The call (see CallBody), or None when ``upload`` says that it comes in parts."""
    upload: Parts | None = None
    progress: bool | None = None
    """Send what the job reports while it runs."""


class Part(WireMessage):
    """One part of a large input."""

    kind = "part"
    job: Id
    client: Id
    index: Count
    data: bytes


class Check(WireMessage):
    """How are these jobs of mine?"""

    kind = "check"
    client: Id
    jobs: Ids
    progress: Annotated[list[ProgressHere], Field(fail_fast=True)] | None = None
    """How much of the progress of these jobs is here; of others with progress, none."""


class Fetch(WireMessage):
    """Send one part of a held result."""

    kind = "fetch"
    client: Id
    job: Id
    index: Count


class Cancel(WireMessage):
    """Stop these jobs and forget them."""

    kind = "cancel"
    client: Id
    jobs: Ids


class Done(WireMessage):
    """These results are here; let them go."""

    kind = "done"
    client: Id
    jobs: Ids


class Heard(WireMessage):
    """The caller has taken a job's progress up to here: there is room for more."""

    kind = "heard"
    client: Id
    job: Id
    attempt: Int
    seq: Count
    follow: bool | None = None
    """Send the progress of all jobs of this client to this message's reply subject from now on."""


class Wait(WireMessage):
    """I have n jobs waiting (0: none any more)."""

    kind = "wait"
    client: Id
    n: int = Field(ge=0, le=MAX_WAITING)
    priority: Int = 0
    fingerprint: str | None = None
    """Only servers with this one may grant."""


class Pass(WireMessage):
    """I do not need this grant."""

    kind = "pass"
    client: Id
    grant: str


class InfoRequest(WireMessage):
    """What is this env?"""

    kind = "info"


class ExamplesRequest(WireMessage):
    """A page of the eval set."""

    kind = "examples"
    start: Count = 0
    count: int = Field(100, ge=1, le=10_000)


class Control(WireMessage):
    """An operator's order."""

    kind = "control"
    action: Literal["drain", "stop", "log_level"]
    level: str | None = None


# ---- server to client


class Accepted(WireMessage):
    """The job is mine."""

    kind = "accepted"
    job: Id
    attempt: Int
    server: Id
    node: Id | None = None
    """Id of the NATS server that it is connected to."""


class Busy(WireMessage):
    """Not now."""

    kind = "busy"
    job: Id
    attempt: Int
    server: Id
    reason: Literal["full", "draining", "fingerprint"] = "full"


class Result(WireMessage):
    """A result that fits on its message."""

    kind = "result"
    job: Id
    attempt: Int
    server: Id
    encoding: Encoding = ""
    body: bytes
    progress: Count | None = None
    """How many progress messages the job sent."""


class Announce(WireMessage):
    """A result that is held here, to be fetched in parts."""

    kind = "announce"
    job: Id
    attempt: Int
    server: Id
    parts: Parts
    progress: Count | None = None
    """How many progress messages the job sent."""


class Progress(WireMessage):
    """What a job reports while it runs, or a part of that."""

    kind = "progress"
    job: Id
    attempt: Int
    """The one that the server took the job with."""
    server: Id
    seq: int = Field(ge=1, le=INT64_MAX)
    """1, 2, ... on this server."""
    more: bool = False
    """The report goes on in the next one."""
    ask: bool = False
    """Say at once when the caller has taken it."""
    body: bytes
    """A msgpack map, or a part of one."""


class Failure(WireMessage):
    """A job, or any other request, that ended without a result."""

    kind = "failure"
    job: Id | None = None
    attempt: Int = 0
    server: Id | None = None
    code: str
    message: str
    retryable: bool = False
    origin: str = ""
    causes: Annotated[list[tuple[str, str]], FailFast()] = []
    progress: Count | None = None
    """How many progress messages the job sent."""

    @property
    def sender(self) -> str | None:
        """The server that speaks: ``server``, or ``origin`` if that is the id of one."""
        return self.server or (self.origin if _ID.fullmatch(self.origin) else None)


class Status(WireMessage):
    """Answer to check."""

    kind = "status"
    server: Id
    node: Id | None = None
    """Id of the NATS server that it is connected to."""
    running: Ids = []
    unknown: Ids = []
    done: Ids = []
    """To be fetched: ask for part 0, whose answer tells how many there are."""
    failed: Annotated[list[Failure], FailFast()] = []
    progress: Annotated[list[ProgressTotal], Field(fail_fast=True)] | None = None
    """How many progress messages each of ``done`` sent, where any were asked for."""


class PartReply(WireMessage):
    """One part of a held result."""

    kind = "part_reply"
    job: Id
    index: Int
    data: bytes
    parts: Parts
    """What the whole is."""


class Grant(WireMessage):
    """You may send me one job."""

    kind = "grant"
    grant: str
    server: Id
    ttl_s: float


class Ok(WireMessage):
    """Heard and done."""

    kind = "ok"
    server: Id
    state: str = ""


class Info(WireMessage):
    """What an env is."""

    kind = "info_reply"
    server: Id
    state: str
    env: str
    env_id: str
    env_args: dict[str, Any] = {}
    fingerprint: str
    versions: Texts = {}
    requires_group_rollouts: bool | None = None
    """None while loading."""
    num_eval_examples: Int | None = None
    max_concurrent: Int
    max_input_bytes: Int
    max_result_bytes: Int
    protocol: Int = PROTOCOL_VERSION


class ExamplesPage(WireMessage):
    """A page of the eval set."""

    kind = "examples_page"
    total: Int
    start: Int
    body: bytes
    """A msgpack map ``{"examples": [...]}``; fewer than asked for when they would not fit on one message."""


class Gone(WireMessage):
    """A controller saw a server's process end: to all clients of its env, who then check for themselves."""

    kind = "gone"
    server: Id
    reason: str = ""


class RecentRollout(BaseModel):
    """A rollout that ended since the last heartbeat; for displays."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    example_id: str
    reward: float | None
    error: str | None = None
    """Type of the error, if it failed."""
    duration_s: float
    client: str


DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of a heartbeat's ``duration_counts``; part of the protocol."""


class Beat(WireMessage):
    """A server's heartbeat, once a second."""

    kind = "beat"
    server: Id
    env: str
    state: Literal["loading", "ready", "full", "draining", "stopping", "failed"]
    error: str | None = None
    host: str
    pid: Int
    started_at: float
    """Seconds since the epoch."""
    slots: Int
    in_flight: Int
    waiting_clients: Int
    waiting_jobs: Int
    held_results: Int
    held_bytes: Int
    short_of_memory: bool = False
    """No work is taken until results are collected or inputs are done with; ``state`` is then full."""
    done: Int
    failed: Int
    cancelled: Int
    busy: Int
    loop_lag_s: float
    """How long the env's loop took to answer, or has not answered yet."""
    oldest_job_s: float
    rss_bytes: Int
    versions: Texts
    env_id: str
    fingerprint: str
    interval_s: float
    controller: str | None = None
    """The controller that launched it."""
    failed_by_type: Counts = {}
    waiting_by_client: Counts = {}
    """First 8 digits of a client's id → jobs that it said wait; at most 20 clients."""
    recent: Annotated[list[RecentRollout], FailFast()] = []
    """At most 5."""
    jobs: Int = 0
    """Jobs taken so far; a group is one job."""
    retried: Int = 0
    """Jobs taken that another server had before: attempts that were lost or stalled."""
    repeated: Int = 0
    """Times that a client sent a job again which was here already."""
    orphaned: Int = 0
    """Jobs dropped because their client was gone."""
    lost_results: Int = 0
    """Held results that were dropped before their client had them."""
    unconfirmed_results: Int = 0
    """Held results that were let go while memory was short: their client was sent them and asked no more."""
    received_bytes: Int = 0
    """Bytes of inputs, as they travelled."""
    sent_bytes: Int = 0
    """Bytes of results and progress, as they travelled."""
    duration_counts: Annotated[list[Int], FailFast()] = []
    """Rollouts by duration: one count per bound of DURATION_BOUNDS_S, and one for what is over the last."""
    duration_sum_s: float = 0.0
    sent_at: float | None = None
    """Seconds since the epoch by the server's clock."""


M = TypeVar("M", bound=WireMessage)


def pack(message: WireMessage) -> bytes:
    """Return the message as bytes."""
    fields: dict[str, Any] = {"v": PROTOCOL_VERSION, "t": message.kind}
    for name, value in message.__dict__.items():
        if value is not None:
            fields[name] = _plain(value)
    return encode(fields)


def _plain(value: Any) -> Any:
    if isinstance(value, WireMessage):
        return {"t": value.kind} | {k: _plain(v) for k, v in value.__dict__.items() if v is not None}
    if isinstance(value, BaseModel):
        return dict(value.__dict__)
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        return [_plain(item) for item in value]
    return value


def read_map(data: bytes) -> dict[str, Any]:
    """Return a message's map with its version checked.

    Raises:
        DecodeError: Not a well-formed map.
        ProtocolVersionError: A version that this side does not speak.
    """
    fields = decode_map(data, limits=WIRE_LIMITS)
    version = fields.get("v", PROTOCOL_VERSION)
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the message has protocol version {reprlib.repr(version)}, this side speaks {PROTOCOL_VERSION}; "
            "upgrade the older side"
        )
    return fields


def parse_map(fields: dict[str, Any]) -> WireMessage:
    """Return the message that a map from read_map() describes.

    Raises:
        BadRequestError: Unknown kind, or fields that do not fit it.
    """
    kind = fields.get("t")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise BadRequestError(f"unknown message kind {reprlib.repr(kind)}")
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequestError(f"{kind}: {where}: {first['msg']}") from error


def parse(data: bytes) -> WireMessage:
    """Return the message in these bytes.

    Raises:
        DecodeError: Not a well-formed map.
        ProtocolVersionError: A version that this side does not speak.
        BadRequestError: Unknown kind, or fields that do not fit it.
    """
    return parse_map(read_map(data))


def parse_as(data: bytes, expected: type[M]) -> M:
    """Return the message in these bytes, which must be of one kind.

    Raises:
        DecodeError: It is not.
    """
    message = parse(data)
    if not isinstance(message, expected):
        raise DecodeError(f"expected {expected.kind}, got {message.kind}")
    return message
