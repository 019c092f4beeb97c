"""What a job asks for: read with care, written without noise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.calls import MAX_GROUP, Call, call_map, read_call
from envbus.bus.codec import decode_map, encode
from envbus.errors import BadRequestError
from envbus.types import ClientConfig, EndpointConfig

INPUT: Any = {"prompt": [{"role": "user", "content": "hi"}], "example_id": 1, "extra": {"kept": [1]}}


def call(**changes: Any) -> Call:
    fields: dict[str, Any] = {
        "kind": "rollout",
        "inputs": [INPUT],
        "client": None,
        "model": "m",
        "sampling_args": None,
        "max_retries": 0,
        "state_columns": None,
    }
    return Call(**(fields | changes))


@pytest.mark.parametrize(
    "made",
    [
        call(),
        call(kind="group", inputs=[INPUT, INPUT]),
        call(kind="group", inputs=[INPUT]),
        call(sampling_args={"temperature": 0.5}, max_retries=3, state_columns=["a", "b"]),
        call(client=ClientConfig(api_base_url="http://h/v1", api_key_var=None, extra_headers={"X": "y"})),
        call(client=ClientConfig(endpoint_configs=(EndpointConfig(api_base_url="http://a"), EndpointConfig()))),
    ],
)
def test_a_call_comes_back_as_it_was(made: Call) -> None:
    assert read_call(decode_map(encode(call_map(made)))) == made


def test_size_counts_rollouts() -> None:
    """CASES P31."""
    assert call().size == 1
    assert call(kind="group", inputs=[INPUT] * 8).size == 8


def test_defaults_are_left_out() -> None:
    assert call_map(call()) == {"model": "m", "input": INPUT}
    assert call_map(call(client=ClientConfig(api_base_url="http://h")))["client"] == {"api_base_url": "http://h"}


def test_the_least_call() -> None:
    assert read_call({"input": {}}) == call(inputs=[{}], model="")


def test_fields_that_are_unknown_are_ignored() -> None:
    """CASES P60."""
    assert read_call({"input": INPUT, "model": "m", "v": 1, "new_in_version_9": 1}) == call()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, "'input' .* 'group_inputs'"),
        ({"input": {}, "group_inputs": [{}]}, "'input' .* 'group_inputs'"),
        ({"input": [{}]}, "input 0 must be a map"),
        ({"input": "hi"}, "input 0"),
        ({"group_inputs": []}, "'group_inputs' must be a list of 1 to"),
        ({"group_inputs": {}}, "'group_inputs'"),
        ({"group_inputs": [{}] * (MAX_GROUP + 1)}, "'group_inputs'"),
        ({"group_inputs": [{}, None]}, "input 1"),
        ({"input": {}, "model": 5}, "'model' must be a str, not a int"),
        ({"input": {}, "model": b"m"}, "'model'"),
        ({"input": {}, "sampling_args": [1]}, "'sampling_args' must be a dict"),
        ({"input": {}, "max_retries": -1}, "'max_retries' must be 0 to 100"),
        ({"input": {}, "max_retries": 101}, "'max_retries'"),
        ({"input": {}, "max_retries": True}, "'max_retries' must be a int, not a bool"),
        ({"input": {}, "max_retries": 1.5}, "'max_retries'"),
        ({"input": {}, "state_columns": "abc"}, "'state_columns' must be a list"),
        ({"input": {}, "state_columns": ["a", 1]}, "'state_columns' must be a list of names"),
        ({"input": {}, "client": "openai"}, "client"),
        ({"input": {}, "client": {"timeout": "long"}}, "client.timeout"),
        ({"input": {}, "client": {"api_key": "sk-1"}}, "client.api_key"),
        ({"input": {}, "client": {"client_type": "other"}}, "client.client_type"),
        ({"input": {}, "client": {"extra_headers": {"a\nb": "c"}}}, "client.extra_headers"),
        (
            {"input": {}, "client": {"endpoint_configs": [{"api_base_url": 1}]}},
            "client.endpoint_configs.0.api_base_url",
        ),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(BadRequestError, match=names):
        read_call(fields)


def test_a_key_sent_by_mistake_is_not_repeated_in_the_error() -> None:
    with pytest.raises(BadRequestError) as caught:
        read_call({"input": {}, "client": {"api_key": "sk-secret", "api_key_var": ["sk-secret"]}})
    assert "sk-secret" not in str(caught.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["input", "group_inputs", "client", "model", "sampling_args", "max_retries", "state_columns"]


@given(st.dictionaries(st.sampled_from(NAMES), JUNK))
def test_any_map_is_a_call_or_a_bad_request(fields: dict[str, Any]) -> None:
    try:
        made = read_call(fields)
    except BadRequestError:
        return
    assert made.size >= 1


@pytest.mark.parametrize(
    "client",
    [{"api_key_var": "\ud800"}, {"api_base_url": "http://a/\ud800"}, {"extra_headers": {"x": "\ud800"}}],
)
def test_a_client_with_text_that_is_no_unicode_is_a_bad_request(client: dict[str, Any]) -> None:
    """A server names its model clients by the JSON of what was asked for."""
    with pytest.raises(BadRequestError, match=r"client\."):
        read_call({"input": {}, "client": client})
