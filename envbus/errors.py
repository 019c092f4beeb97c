"""Every error of envbus, in one tree.

EnvbusError
├── UsageError                     bad arguments, settings or files of ours
├── EnvironmentLoadError           load_environment(env_id) failed
│   ├── EnvironmentNotFoundError   no such module
│   ├── LoaderMissingError         the module has no load_environment
│   ├── EnvArgsError               load_environment refused its arguments
│   └── EnvironmentCrashedError    an exception inside the environment's code
├── BusError                       the connection to NATS
│   ├── BusUnreachableError        nobody answers, or it is not NATS
│   ├── BusAuthError               wrong or missing credentials
│   ├── BusPermissionError         the server denied a subject
│   ├── BusClosedError             used after close, or closed with calls pending
│   └── PayloadTooLargeError       a message over the connection's limit
├── CodecError                     a value or bytes that do not fit the wire
│   ├── EncodeError
│   └── DecodeError
├── CallError                      a call that ended without a result
│   ├── BadRequestError            the server refused the request's content
│   ├── ProtocolVersionError       the two sides speak no common version
│   ├── NoServerError              nobody serves this env
│   ├── ServerLoadingError         its servers are still loading
│   ├── ServerStoppingError        the server stopped before the job was done
│   ├── ServerLostError            servers died or stalled under the job, attempts used up
│   ├── CallTimeoutError           the caller's own time limit
│   ├── LateRequestError           it reached the server after its caller had given up
│   ├── CallCancelledError         cancelled on the server
│   ├── LeaseExpiredError          the server heard nothing of the client for too long
│   ├── ResultTooLargeError        over the stated ceiling
│   ├── ResultLostError            the server no longer holds the result
│   ├── FingerprintError           no server of the pinned fingerprint
│   └── RemoteError                anything else the server reports
└── RolloutError                   a rollout that failed: data in the output, see error_info()
    ├── ModelError
    │   ├── InvalidModelResponseError
    │   │   └── EmptyModelResponseError
    │   ├── ModelKeyError
    │   ├── ModelAddressError      a URL that may not be called here
    │   ├── ModelUnreachableError  no connection, or it broke, in every try
    │   ├── ModelTimeoutError      no answer within the time for one call
    │   ├── ModelRateLimitError    429 in every try
    │   └── ModelServerError       5xx, 408 or 409 in the last try
    ├── OverlongPromptError
    ├── RolloutTimeoutError
    ├── ScoringError
    ├── ToolError
    │   ├── ToolParseError
    │   └── ToolCallError
    └── InfraError
"""

from __future__ import annotations

from typing import ClassVar


class EnvbusError(Exception):
    """Base of all errors of envbus.

    Attributes:
        code: Stable name of the kind on the wire, e.g. ``"server_lost"``.
        retryable: Whether the same call may succeed when it is made again.
    """

    code: ClassVar[str] = "error"
    retryable: bool = False


class UsageError(EnvbusError):
    """Bad arguments, settings or files; the message says what to change."""

    code = "usage"


class EnvironmentLoadError(EnvbusError):
    """An environment could not be loaded."""

    code = "env_load"


class EnvironmentNotFoundError(EnvironmentLoadError):
    """No module of that name is installed."""

    code = "env_not_found"


class LoaderMissingError(EnvironmentLoadError):
    """The module exists but has no ``load_environment`` function."""

    code = "env_loader_missing"


class EnvArgsError(EnvironmentLoadError):
    """``load_environment`` does not take these arguments."""

    code = "env_args"


class EnvironmentCrashedError(EnvironmentLoadError):
    """The environment's own code raised while it was imported or loaded."""

    code = "env_crashed"


class BusError(EnvbusError):
    """The connection to NATS failed."""

    code = "bus"


class BusUnreachableError(BusError):
    """No NATS server answered at the address."""

    code = "bus_unreachable"
    retryable = True


class BusAuthError(BusError):
    """The NATS server refused the credentials."""

    code = "bus_auth"


class BusPermissionError(BusError):
    """The NATS server denied publishing to, or subscribing to, a subject."""

    code = "bus_permission"


class BusClosedError(BusError):
    """The connection is closed; the outcome of calls that were pending is unknown."""

    code = "bus_closed"


class PayloadTooLargeError(BusError):
    """A message does not fit the connection's max_payload.

    Attributes:
        size_bytes: Size of the message, headers counted.
        limit_bytes: The connection's limit.
    """

    code = "payload_too_large"

    def __init__(self, *, size_bytes: int, limit_bytes: int, what: str = "message") -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(
            f"{what} of {size_bytes:,} bytes is over the limit of {limit_bytes:,} bytes; "
            "raise max_payload of the NATS server or send less"
        )


class CodecError(EnvbusError):
    """A value or a message that the wire format cannot carry."""

    code = "codec"


class EncodeError(CodecError):
    """A value cannot be encoded.

    Attributes:
        path: Where it is, e.g. ``"info.rows[3].handle"``.
    """

    code = "encode"

    def __init__(self, message: str, *, path: str = "") -> None:
        self.path = path
        super().__init__(f"{path or 'value'}: {message}")


class DecodeError(CodecError):
    """Bytes are not a well-formed message within the limits."""

    code = "decode"


class CallError(EnvbusError):
    """A call that ended without a result.

    Attributes:
        origin: Who reported it: ``"client"`` or a server id.
        causes: The causes as ``(type, message)``, outermost first.
    """

    code = "call"

    def __init__(
        self,
        message: str,
        *,
        origin: str = "client",
        causes: tuple[tuple[str, str], ...] = (),
        retryable: bool | None = None,
    ) -> None:
        self.origin = origin
        self.causes = causes
        if retryable is not None:
            self.retryable = retryable
        super().__init__(message)


class BadRequestError(CallError):
    """The server refused the request: a field is missing, malformed or too large."""

    code = "bad_request"


class ProtocolVersionError(CallError):
    """Client and server speak no common protocol version."""

    code = "protocol_version"


class NoServerError(CallError):
    """No server of this env is on the bus."""

    code = "no_server"
    retryable = True


class ServerLoadingError(CallError):
    """Servers of this env are there, but none has finished loading."""

    code = "server_loading"
    retryable = True


class ServerStoppingError(CallError):
    """The server is stopping and ended the job before it was done."""

    code = "server_stopping"
    retryable = True


class ServerLostError(CallError):
    """Every attempt of the job lost its server."""

    code = "server_lost"
    retryable = True


class CallTimeoutError(CallError):
    """The time limit that the caller gave this call is over."""

    code = "call_timeout"


class LateRequestError(CallError):
    """The request reached the server too late to be started."""

    code = "late_request"


class CallCancelledError(CallError):
    """The job was cancelled on the server."""

    code = "cancelled"


class LeaseExpiredError(CallError):
    """The server had not heard of this client for too long and ended its job."""

    code = "lease_expired"
    retryable = True


class ResultTooLargeError(CallError):
    """The result is larger than the stated ceiling."""

    code = "result_too_large"


class ResultLostError(CallError):
    """The job is done, but the server no longer holds its result."""

    code = "result_lost"
    retryable = True


class FingerprintError(CallError):
    """The servers of this env do not have the pinned fingerprint."""

    code = "fingerprint"


class RemoteError(CallError):
    """An error that a server reported and that has no type of its own here."""

    code = "remote"


class RolloutError(EnvbusError):
    """A rollout that failed. It becomes the output's ``error``, never a silent reward of 0."""

    code = "rollout"


class ModelError(RolloutError):
    """The model endpoint failed, or refused the request (4xx)."""

    code = "model"


class InvalidModelResponseError(ModelError):
    """The endpoint answered with something that is not a chat completion."""

    code = "model_response"
    retryable = True


class EmptyModelResponseError(InvalidModelResponseError):
    """The model answered with neither text nor tool calls."""

    code = "model_empty"


class ModelKeyError(ModelError):
    """This process may not use, or does not have, the API key that the call names."""

    code = "model_key"


class ModelAddressError(ModelError):
    """The model's URL may not be called here: not allowed, a loopback of another host, or a metadata service."""

    code = "model_address"


class ModelUnreachableError(ModelError):
    """No connection to the model endpoint, or one that broke, in every try."""

    code = "model_unreachable"
    retryable = True


class ModelTimeoutError(ModelError):
    """The model endpoint gave no answer within the time for one call, tries and waits counted."""

    code = "model_timeout"
    retryable = True


class ModelRateLimitError(ModelError):
    """The model endpoint answered 429 in the last try."""

    code = "model_rate_limit"
    retryable = True


class ModelServerError(ModelError):
    """The model endpoint failed: 5xx, 408 or 409 in the last try."""

    code = "model_server"
    retryable = True


class OverlongPromptError(RolloutError):
    """Prompt and requested tokens exceed the model's context length."""

    code = "overlong_prompt"


class RolloutTimeoutError(RolloutError):
    """The rollout took longer than its time limit."""

    code = "rollout_timeout"


class ScoringError(RolloutError):
    """A reward function raised or returned something that is not a number."""

    code = "scoring"


class ToolError(RolloutError):
    """A tool of the environment failed."""

    code = "tool"


class ToolParseError(ToolError):
    """The arguments of a tool call are not valid."""

    code = "tool_parse"


class ToolCallError(ToolError):
    """A tool raised."""

    code = "tool_call"


class InfraError(RolloutError):
    """Infrastructure behind the environment (sandbox, browser, database) failed."""

    code = "infra"
    retryable = True
