"""The protocol of verifiers 0.1.x: ZMQEnvClient's frames as requests, answers as its frames (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from envbus.adapters.gateway.requests import Cancel, Frames, Health, Run
from envbus.adapters.gateway.wire import pack, unpack_map
from envbus.adapters.verifiers.classic_outputs import classic_output
from envbus.adapters.verifiers.client_configs import client_config
from envbus.errors import BadRequestError

if TYPE_CHECKING:
    from envbus.types import RolloutProgress

NUM_FRAMES = 2
_PING = b"ping"
_CANCEL = b""
_INPUTS = {"run_rollout": "input", "run_group": "group_inputs"}


class Classic:
    """``[id, map]`` or ``[id, ping]`` or, to cancel, ``[id, empty]``; answers are ``[id, map]``."""

    def read(self, frames: Sequence[bytes]) -> Health | Cancel | Run:
        """What a message asks for. A ``request_id`` inside the map means nothing.

        Raises:
            BadRequestError: Not a request of this protocol.
            UsageError: A client config that asks for what servers on the bus do not do.
        """
        request_id, payload = frames
        if payload == _CANCEL:
            return Cancel(request_id, target=request_id)
        if payload == _PING:
            return Health(request_id)
        fields = unpack_map(payload)
        kind = fields.get("request_type")
        if not isinstance(kind, str) or kind not in _INPUTS:
            raise BadRequestError(f"Unknown request type: {str(kind)[:200]}")
        is_group = kind == "run_group"
        inputs = typed(fields, _INPUTS[kind], list if is_group else dict)
        inputs = inputs if is_group else [inputs]
        if not all(isinstance(each, dict) for each in inputs):
            raise BadRequestError("group_inputs must be a list of maps")
        return Run(
            request_id,
            kind="group" if is_group else "rollout",
            inputs=inputs,
            client=client_config(typed(fields, "client_config", dict), inputs),
            model=typed(fields, "model", str),
            sampling_args=typed(fields, "sampling_args", dict),
            max_retries=typed(fields, "max_retries", int),
            state_columns=fields.get("state_columns"),
        )

    def health(self, request_id: bytes, trouble: str | None) -> Frames:
        """``success`` is whether rollouts are taken; the client waits for it."""
        return _answer(request_id, success=trouble is None, error=trouble)

    def cancel(self, request_id: bytes, was_running: bool) -> None:
        """A cancel has no answer of its own."""

    def done(self, run: Run, outputs: list[Any]) -> Frames:
        """The outputs, with all fields that the library's own have."""
        whole = [classic_output(output, example) for output, example in zip(outputs, run.inputs, strict=True)]
        fields = {"outputs": whole} if run.kind == "group" else {"output": whole[0]}
        return _answer(run.request_id, success=True, error=None, **fields)

    def failed(self, request_id: bytes, error: BaseException) -> Frames:
        """The client raises a RuntimeError with this text."""
        return _answer(request_id, success=False, error=repr(error))

    def cancelled(self, request_id: bytes) -> Frames:
        """The client that cancelled does not wait for it."""
        return _answer(request_id, success=False, error="Request was cancelled")

    def stopped(self, request_id: bytes) -> None:
        """None: the client sees that its health checks fail, and asks again once they do not."""

    def progress(self, request_id: bytes) -> Callable[[RolloutProgress], list[Frames]]:
        """Nothing: this generation is not told."""
        return lambda progress: []

    def probe(self) -> Frames:
        """An answer to no request."""
        return _answer(b"envbus-probe", success=True, error=None)


def typed(fields: dict[Any, Any], name: str, kind: type) -> Any:
    """A field of a request.

    Raises:
        BadRequestError: It is missing or of another type.
    """
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadRequestError(f"'{name}' must be a {kind.__name__}, not {type(value).__name__}")
    return value


def _answer(request_id: bytes, **fields: Any) -> Frames:
    return [request_id, pack(fields)]
