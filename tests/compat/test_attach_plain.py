"""What is translated for the classic library's tools: client configs to ours, outputs to theirs. Needs no library."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from envbus.adapters.verifiers import attach
from envbus.adapters.verifiers.classic_outputs import classic_output
from envbus.adapters.verifiers.client_configs import client_config
from envbus.errors import UsageError

THEIRS: dict[str, Any] = {
    "client_idx": 3,
    "client_type": "openai_chat_completions",
    "renderer": "auto",
    "renderer_model_name": None,
    "tool_parser": "hermes",
    "api_key_var": "MY_KEY",
    "api_base_url": "http://models:8000/v1",
    "endpoint_configs": [],
    "timeout": 60.0,
    "connect_timeout": 2.0,
    "max_connections": 28000,
    "max_keepalive_connections": 27000,
    "max_retries": 10,
    "extra_headers": {"X-Team": "a"},
    "extra_headers_from_state": {},
}
ROWS = [{"example_id": 7, "user": None}, {"example_id": 7, "user": None}]


def test_every_field_of_a_client_config_arrives() -> None:
    ours = client_config({**THEIRS, "extra_headers_from_state": {"X-Id": "example_id", "X-User": "user"}}, ROWS)
    assert ours.model_dump(exclude_unset=True) == {
        "api_key_var": "MY_KEY",
        "api_base_url": "http://models:8000/v1",
        "timeout": 60.0,
        "connect_timeout": 2.0,
        "max_connections": 28000,
        "max_keepalive_connections": 27000,
        "max_retries": 10,
        "extra_headers": {"X-Team": "a", "X-Id": "7"},
    }


def test_another_version_of_the_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.serve", None)
    monkeypatch.delitem(sys.modules, "envbus.adapters.verifiers.remote_client", raising=False)
    with pytest.raises(UsageError, match=r"needs verifiers 0\.1\.14"):
        attach(SimpleNamespace(env_id="e", env_args={}, env_client=None), "nats://127.0.0.1:1")


@pytest.mark.parametrize("variable", ["", "EMPTY"])
def test_an_endpoint_without_keys(variable: str) -> None:
    assert client_config({**THEIRS, "api_key_var": variable}, ROWS).api_key_var is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"client_type": "renderer"}, "client_type 'renderer' cannot cross the bus"),
        ({"endpoint_configs": [{}]}, "endpoint_configs must be resolved"),
        ({"new_setting": 1}, "client config: new_setting cannot cross the bus"),
        ({"extra_headers_from_state": {"X-Id": "trajectory_id"}}, "'trajectory_id', which the example does not hold"),
        ({"extra_headers_from_state": {"X-Id": "place"}}, "'place' differs within a group"),
        ({"timeout": 0}, "timeout"),
        ({"extra_headers": {"X": "a\nb"}}, "extra_headers"),
    ],
)
def test_what_servers_do_not_do_is_refused(change: dict[str, Any], word: str) -> None:
    rows = [{"place": 1}, {"place": 2}]
    with pytest.raises(UsageError, match=word):
        client_config({**THEIRS, **change}, rows)


def test_an_output_of_a_native_environment() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    native = {
        "example_id": 1,
        "prompt": [{"role": "user", "content": "Add."}],
        "completion": [{"role": "assistant", "content": None, "tool_calls": [call]}],
        "reward": 0.5,
        "metrics": {"right": 0.5},
        "timing": {
            "start_time": 10.0,
            "setup_s": 1.0,
            "generation_s": 2.0,
            "scoring_s": 0.5,
            "model_s": 1.5,
            "total_s": 4,
        },
        "tool_defs": [{"type": "function", "function": {"name": "add"}}],
        "token_usage": None,
        "info": {},
        "error": None,
    }
    output = classic_output(native, {})
    assert output["completion"][0]["tool_calls"] == ['{"id": "c1", "name": "add", "arguments": "{}"}']
    assert output["tool_defs"] == [{"name": "add"}]
    assert output["right"] == output["reward"] == 0.5
    assert not {"token_usage", "info"} & set(output)
    assert output["timing"]["scoring"] == {"start": 13.0, "end": 13.5, "duration": 0.5}
    assert output["timing"]["overhead"] == 1.0


def test_a_failed_output_is_whole() -> None:
    error = {"error": "KeyError", "error_chain_repr": "KeyError('x')", "error_chain_str": "KeyError"}
    example = {"example_id": 4, "prompt": [{"role": "user", "content": "Hi."}]}
    output = classic_output({"reward": None, "error": error, "metrics": None}, example)
    assert output["prompt"] == example["prompt"]
    assert (output["example_id"], output["reward"], output["metrics"]) == (4, 0.0, {})
    assert (output["error_chain"], output["long_error_chain"]) == ("KeyError('x')", "KeyError")
    assert output["timing"]["generation"]["duration"] == 0


def test_an_output_of_the_library_stays_as_it_is() -> None:
    theirs = {"example_id": 1, "prompt": [], "completion": [], "reward": None, "error": None, "metrics": None}
    theirs |= {"timing": {"generation": {}}, "is_completed": True, "is_truncated": False, "stop_condition": "x"}
    assert classic_output({**theirs, "tool_defs": []}, {}) == {**theirs, "tool_defs": []}
