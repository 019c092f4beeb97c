"""The outputs of a job as the body of its result. An output that cannot be packed fails alone, its group is kept.

Made on the env's loop when the outputs are there, so that nothing that the environment does later shows in the result;
its long lists are copied by CopyTurns. Encoded anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from envbus.bus.calls import Call
from envbus.bus.codec import Frozen, Limits, encode_frozen, freeze, to_plain
from envbus.errors import EncodeError, RolloutError
from envbus.evaluation.rows import failed_output
from envbus.settings import MAX_BODY_BYTES
from envbus.types import RolloutInput, RolloutOutput

RESULT_LIMITS = Limits(max_bytes=MAX_BODY_BYTES)
"""The ceiling for results is the server's setting, which is checked once a result is encoded."""


class ResultBody:
    """The result of one job.

    Attributes:
        frozen: The map that travels.
        outputs: Its outputs, for their small fields: a long list in them is no list here.
    """

    def __init__(self, call: Call, outputs: Sequence[RolloutOutput]) -> None:
        self._inputs = call.inputs
        try:
            self.frozen = _frozen(call, outputs)
        except EncodeError:
            self.frozen = _frozen(call, [_freezable(*pair) for pair in zip(call.inputs, outputs, strict=True)])
        tree = self.frozen.tree
        self.outputs: list[Any] = tree["outputs"] if call.kind == "group" else [tree["output"]]
        self._replaced: list[Any] = []
        """Kept, as what is frozen goes by ids."""
        for index, output in enumerate(self.outputs):
            if type(output) is not dict:
                self._fail(index, RolloutError(f"an output of type {type(outputs[index]).__name__} is not a dict"))

    def encode(self) -> bytes:
        """Return the body.

        Raises:
            EncodeError: Too large, without what cannot be encoded at all.
        """
        try:
            return encode_frozen(self._map(), limits=RESULT_LIMITS)
        except EncodeError:
            for index, output in enumerate(self.outputs):
                try:
                    encode_frozen(self.frozen.part(output), limits=RESULT_LIMITS)
                except EncodeError as error:
                    self._fail(index, error)
            return encode_frozen(self._map(), limits=RESULT_LIMITS)

    def _map(self) -> Frozen:
        if "output" in self.frozen.tree:
            self.frozen.tree["output"] = self.outputs[0]
        return self.frozen

    def _fail(self, index: int, error: BaseException) -> None:
        self._replaced.append(self.outputs[index])
        self.outputs[index] = to_plain(failed(self._inputs[index], error, start_time=time.time(), total_s=0.0))


def failed(item: RolloutInput, error: BaseException, *, start_time: float, total_s: float) -> RolloutOutput:
    """Return the output of a rollout that gave none."""
    example_id = item.get("example_id", 0)
    return failed_output(item, error, example_id=example_id, start_time=start_time, total_s=total_s)


def _frozen(call: Call, outputs: Sequence[RolloutOutput]) -> Frozen:
    result = {"outputs": list(outputs)} if call.kind == "group" else {"output": outputs[0]}
    return freeze(result, limits=RESULT_LIMITS, copy_lists=False)


def _freezable(item: RolloutInput, output: RolloutOutput) -> RolloutOutput:
    try:
        freeze(output, limits=RESULT_LIMITS, copy_lists=False)
    except EncodeError as error:
        return failed(item, error, start_time=time.time(), total_s=0.0)
    return output
