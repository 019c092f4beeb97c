"""The protocol of verifiers 0.4: EnvClient's frames as requests, answers and deltas as its frames (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from envbus.adapters.gateway.classic import typed
from envbus.adapters.gateway.requests import Cancel, Frames, Health, Run
from envbus.adapters.gateway.wire import pack, unpack_map
from envbus.errors import BadRequestError, RemoteError
from envbus.types import ClientConfig

if TYPE_CHECKING:
    from envbus.types import RolloutProgress

NUM_FRAMES = 3


class Taskset:
    """``[id, method, map]``; answers are ``[id, b"delta", map]``, then ``[id, b"reply", map]``."""

    def read(self, frames: Sequence[bytes]) -> Health | Cancel | Run:
        """What a message asks for.

        Raises:
            BadRequestError: Not a request of this protocol.
        """
        request_id, method, payload = frames
        fields = unpack_map(payload)
        match method:
            case b"health":
                return Health(request_id)
            case b"cancel":
                return Cancel(request_id, target=typed(fields, "request_id", str).encode("utf-8", "surrogatepass"))
            case b"run":
                return _run(request_id, fields)
        raise BadRequestError(f"unknown method {method[:100].decode('utf-8', 'backslashreplace')!r}")

    def health(self, request_id: bytes, trouble: str | None) -> Frames | None:
        """Nothing while there is trouble: this client waits for an answer, but gives up at one that says no."""
        return None if trouble is not None else _reply(request_id, success=True, error=None)

    def cancel(self, request_id: bytes, was_running: bool) -> Frames:
        """Whether there was something to cancel."""
        return _reply(request_id, success=True, error=None, cancelled=was_running)

    def done(self, run: Run, outputs: list[Any]) -> Frames:
        """The episode's head and the sizes of its traces, which went ahead as deltas.

        Raises:
            RemoteError: The rollout failed, or its environment is not of this generation.
        """
        (output,) = outputs
        episode = output.get("episode")
        if isinstance(episode, dict):
            return _reply(run.request_id, success=True, error=None, **episode)
        error = output.get("error")
        if isinstance(error, dict):
            raise RemoteError(str(error.get("error_chain_repr") or error.get("error")))
        raise RemoteError("this environment runs no tasks of verifiers 0.4: connect to it with its 0.1 client")

    def failed(self, request_id: bytes, error: BaseException) -> Frames:
        """The client raises a RuntimeError with this text."""
        return _reply(request_id, success=False, error=f"{type(error).__name__}: {error}")

    def cancelled(self, request_id: bytes) -> Frames:
        """The end of a run that was cancelled."""
        return _reply(request_id, success=False, error="Cancelled: rollout aborted")

    def stopped(self, request_id: bytes) -> Frames:
        """This client would wait for ever."""
        return _reply(request_id, success=False, error="Cancelled: the gateway stops")

    def progress(self, request_id: bytes) -> Callable[[RolloutProgress], list[Frames]]:
        """Deltas of one run."""
        deltas = Deltas()
        return lambda progress: [
            [request_id, b"delta", pack(delta)] for delta in deltas.of(progress.attempt, progress.data)
        ]

    def probe(self) -> Frames:
        """A reply to no request."""
        return _reply(b"envbus-probe", success=True, error=None)


class Deltas:
    """Those of one run, whose attempts may be lost: the client drops what a lost attempt began.

    A server that only stalled may go on with its attempt beside the next: the client has no traces for that any more.
    """

    def __init__(self) -> None:
        self._attempt = 0
        self._open: list[str] = []

    def of(self, attempt: int, delta: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What to send for a delta of an attempt."""
        if attempt < self._attempt:
            return []
        lost: list[Mapping[str, Any]] = []
        if attempt > self._attempt:
            lost = [{"trace": trace, "discard": True} for trace in self._open]
            self._attempt, self._open = attempt, []
        trace = str(delta.get("trace"))
        if delta.get("discard"):
            self._open = [each for each in self._open if each != trace]
        elif trace not in self._open:
            self._open.append(trace)
        return [*lost, delta]


def _run(request_id: bytes, fields: dict[Any, Any]) -> Run:
    data = typed(fields, "task_data", dict)
    sampling = typed(fields, "sampling", dict)
    client = typed(fields, "client", dict)
    row = {"task_data": data, "client": client, "sampling": sampling}
    return Run(
        request_id,
        kind="rollout",
        inputs=[row],
        client=_place(client),
        model=typed(fields, "model", str),
        sampling_args={},
        streams=True,
    )


def _place(client: Mapping[Any, Any]) -> ClientConfig | None:
    """Where the model is. It is called by the client's own config; this lets the bus say whose loopback is meant."""
    base_url = client.get("base_url")
    if not isinstance(base_url, str):
        return None
    try:
        return ClientConfig(api_base_url=base_url, api_key_var=None)
    except ValidationError as error:
        raise BadRequestError(f"client.base_url: {error.errors()[0]['msg']}") from error


def _reply(request_id: bytes, **fields: Any) -> Frames:
    return [request_id, b"reply", pack(fields)]
