"""A model's address as verifiers 0.1.x names it, in ours: field by field, nothing dropped in silence.

Works on plain data: verifiers need not be installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from envbus.errors import UsageError
from envbus.types import ClientConfig

CLIENT_TYPE = "openai_chat_completions"
NO_KEY_NAMES = ("", "EMPTY")
"""Names of a key's variable that mean an endpoint without keys."""
_SAME = (
    "api_base_url",
    "timeout",
    "connect_timeout",
    "max_connections",
    "max_keepalive_connections",
    "max_retries",
    "extra_headers",
)
_OF_OTHER_CLIENT_TYPES = (
    "renderer",
    "renderer_model_name",
    "renderer_pool_size",
    "tool_parser",
    "reasoning_parser",
    "preserve_all_thinking",
    "preserve_thinking_between_tool_calls",
)
_HANDLED = {*_SAME, *_OF_OTHER_CLIENT_TYPES}
_HANDLED |= {"client_idx", "client_type", "api_key_var", "endpoint_configs", "extra_headers_from_state"}


def client_config(theirs: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> ClientConfig:
    """Translate a resolved ClientConfig of verifiers 0.1.x.

    Args:
        theirs: Its fields.
        inputs: The rollouts that it is for: ``extra_headers_from_state`` takes its values from them.

    Raises:
        UsageError: A field asks for what servers on the bus do not do.
    """
    _refuse_what_has_no_counterpart(theirs)
    fields = {name: theirs[name] for name in _SAME if name in theirs}
    headers = _headers_from_inputs(theirs.get("extra_headers_from_state") or {}, inputs)
    fields["extra_headers"] = {**(fields.get("extra_headers") or {}), **headers}
    variable = theirs.get("api_key_var")
    try:
        return ClientConfig(**fields, api_key_var=None if variable in NO_KEY_NAMES else variable)
    except ValidationError as error:
        raise UsageError(f"this client config cannot cross the bus: {error}") from error


def _refuse_what_has_no_counterpart(theirs: Mapping[str, Any]) -> None:
    client_type = theirs.get("client_type", CLIENT_TYPE)
    if client_type != CLIENT_TYPE:
        raise UsageError(
            f"client_type {client_type!r} cannot cross the bus: servers call models by {CLIENT_TYPE!r} only"
        )
    if theirs.get("endpoint_configs"):
        raise UsageError("endpoint_configs must be resolved to one endpoint before a call, as the library does it")
    if unknown := sorted(name for name in theirs.keys() - _HANDLED if theirs[name]):
        raise UsageError(f"client config: {', '.join(unknown)} cannot cross the bus: leave it out")


def _headers_from_inputs(wanted: Mapping[str, str], inputs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Headers whose values the examples hold; the library leaves out those that are None."""
    headers = {}
    for header, key in wanted.items():
        if any(key not in example for example in inputs):
            raise UsageError(
                f"extra_headers_from_state: header {header!r} takes {key!r}, which the example does not hold; over the "
                "bus only what examples hold can become a header"
            )
        values = {str(example[key]) for example in inputs if example[key] is not None}
        if len(values) > 1:
            raise UsageError(f"extra_headers_from_state: {key!r} differs within a group, which has one set of headers")
        if values:
            headers[header] = values.pop()
    return headers
