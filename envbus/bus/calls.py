"""What a job asks for: the map that a Run's body holds, and that a plain request is.

Only the envelope of a call is checked, never a prompt's content: that is the
environment's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from envbus.bus.loopback import is_loopback, loopback_id
from envbus.errors import BadRequestError
from envbus.types import ClientConfig, RolloutInput, SamplingArgs

MAX_GROUP = 100_000


@dataclass(frozen=True, slots=True)
class Call:
    """One run_rollout or run_group call."""

    kind: Literal["rollout", "group"]
    inputs: list[RolloutInput]
    client: ClientConfig | None
    model: str
    sampling_args: SamplingArgs | None
    max_retries: int
    state_columns: list[str] | None
    loopback: str | None = None
    """Whose loopback the client's URLs mean, where one of them is a loopback URL; see envbus.bus.loopback."""

    @property
    def size(self) -> int:
        """Slots that it takes."""
        return len(self.inputs)


def call_map(call: Call) -> dict[str, Any]:
    """Return the call as the map that crosses the bus."""
    fields: dict[str, Any] = {"model": call.model}
    if call.kind == "group":
        fields["group_inputs"] = call.inputs
    else:
        fields["input"] = call.inputs[0]
    if call.client is not None:
        fields["client"] = call.client.model_dump(mode="json", exclude_unset=True)
        endpoints = call.client.endpoint_configs or (call.client,)
        if any(is_loopback(each.api_base_url) for each in endpoints) and (here := loopback_id()) is not None:
            fields["loopback"] = here
    if call.sampling_args:
        fields["sampling_args"] = call.sampling_args
    if call.max_retries:
        fields["max_retries"] = call.max_retries
    if call.state_columns:
        fields["state_columns"] = call.state_columns
    return fields


def read_call(fields: Mapping[str, Any]) -> Call:
    """Return the call in a map.

    Raises:
        BadRequestError: A field is missing or has the wrong type.
    """
    group = fields.get("group_inputs")
    single = fields.get("input")
    if (group is None) == (single is None):
        raise BadRequestError("a call has either 'input' (run_rollout) or 'group_inputs' (run_group)")
    inputs = [single] if group is None else group
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MAX_GROUP:
        raise BadRequestError(f"'group_inputs' must be a list of 1 to {MAX_GROUP} inputs")
    for number, item in enumerate(inputs):
        if not isinstance(item, dict):
            raise BadRequestError(f"input {number} must be a map with 'prompt' and 'example_id'")
    return Call(
        kind="rollout" if group is None else "group",
        inputs=inputs,
        client=_read_client(fields.get("client")),
        model=_typed(fields, "model", str, ""),
        sampling_args=_typed(fields, "sampling_args", dict, None),
        max_retries=_read_retries(fields),
        state_columns=_read_columns(fields),
        loopback=_typed(fields, "loopback", str, None),
    )


def _read_client(value: Any) -> ClientConfig | None:
    if value is None:
        return None
    try:
        return ClientConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadRequestError(f"client.{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from error


def _typed(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadRequestError(f"'{name}' must be a {kind.__name__}, not a {type(value).__name__}")
    return value


def _read_retries(fields: Mapping[str, Any]) -> int:
    retries = int(_typed(fields, "max_retries", int, 0))
    if not 0 <= retries <= 100:
        raise BadRequestError(f"'max_retries' must be 0 to 100, not {retries}")
    return retries


def _read_columns(fields: Mapping[str, Any]) -> list[str] | None:
    columns: list[str] | None = _typed(fields, "state_columns", list, None)
    if columns is not None and not all(isinstance(column, str) for column in columns):
        raise BadRequestError("'state_columns' must be a list of names")
    return columns
