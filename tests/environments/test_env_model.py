"""Model clients and calls against a loopback endpoint."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from typing import Any

import pytest
from env_model_stub import ModelStub, completion, error_reply, tool_call

from envbus.environments import ModelClients, Rubric, SingleTurnEnv, close_clients, resolve_client
from envbus.environments.model_call import ChatResult, chat, read_completion
from envbus.errors import (
    EmptyModelResponseError,
    InvalidModelResponseError,
    ModelError,
    ModelKeyError,
    OverlongPromptError,
)
from envbus.types import ClientConfig, EndpointConfig

PROMPT = [{"role": "user", "content": "hi"}]


async def ask(stub: ModelStub, sampling_args: dict[str, Any] | None = None, **settings: Any) -> ChatResult:
    return await chat(resolve_client(stub.config(**settings)), "m", PROMPT, sampling_args)


async def test_an_answer_is_plain_data_without_nulls(stub: ModelStub) -> None:
    result = await ask(stub)

    assert result.message == {"role": "assistant", "content": "hello"}
    assert result.usage == {"input_tokens": 7, "output_tokens": 3}
    assert result.finish_reason == "stop"
    assert not result.is_truncated
    assert result.tokens is None
    assert "null" not in json.dumps(result.response)
    assert result.response["model"] == "m"


async def test_the_message_fits_into_the_next_prompt(stub: ModelStub) -> None:
    calls = [tool_call("f", {"x": 1})]
    stub.answer = lambda request: completion(None, tool_calls=calls, annotations=[], reasoning_content="because")

    message = (await ask(stub)).message

    assert message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "because",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }


async def test_sampling_args_reach_the_endpoint(stub: ModelStub) -> None:
    await ask(stub, {"max_tokens": 5, "temperature": None, "top_p": 0.5, "top_k": 20, "extra_body": {"min_tokens": 1}})

    request = stub.requests[0]
    assert request["max_completion_tokens"] == 5
    assert (request["top_p"], request["top_k"], request["min_tokens"]) == (0.5, 20, 1)
    assert not {"max_tokens", "temperature", "extra_body"} & set(request)


def test_max_completion_tokens_wins_over_max_tokens(sync_stub: ModelStub) -> None:
    async def main() -> None:
        await ask(sync_stub, {"max_tokens": 5, "max_completion_tokens": 6})
        await close_clients()

    asyncio.run(main())
    assert sync_stub.requests[0]["max_completion_tokens"] == 6


def test_token_ids_and_logprobs_become_step_tokens() -> None:
    body = completion("ab", finish_reason="length")
    body["prompt_token_ids"] = [1, 2, 3]
    body["choices"][0]["token_ids"] = [4, 5]
    body["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]}

    tokens = read_completion(json.dumps(body).encode()).tokens

    assert tokens == {
        "prompt_ids": [1, 2, 3],
        "prompt_mask": [0, 0, 0],
        "completion_ids": [4, 5],
        "completion_mask": [1, 1],
        "completion_logprobs": [-0.5, -1.0],
        "is_truncated": True,
    }
    del body["choices"][0]["logprobs"]["content"][0]
    with pytest.raises(InvalidModelResponseError):
        read_completion(json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"<html>gateway</html>",
        b"",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"choices": []}',
        b'{"choices": [1]}',
        b'{"choices": [{"message": "x"}]}',
        b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": [{"message": {"content": "x", "tool_calls": [{"id": "1"}]}}]}',
        b'{"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}',
        b"[" * 100_000,
        b"\xff" * 2_000_000,
    ],
)
def test_garbage_is_an_invalid_response(body: bytes) -> None:
    with pytest.raises(InvalidModelResponseError) as caught:
        read_completion(body)

    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize("content", [None, ""])
async def test_an_empty_answer_has_its_own_type(stub: ModelStub, content: str | None) -> None:
    stub.answer = lambda request: completion(content)

    with pytest.raises(EmptyModelResponseError):
        await ask(stub)


async def test_context_length_refusals_are_overlong_prompts(stub: ModelStub) -> None:
    """P30 (b): not retryable, and told apart from other 400s."""
    stub.answer = lambda request: error_reply(400, "This model's maximum context length is 100 tokens. " + "x" * 9_999)
    with pytest.raises(OverlongPromptError) as caught:
        await ask(stub)
    assert len(str(caught.value)) <= 1_000

    stub.answer = lambda request: error_reply(400, "unknown parameter")
    with pytest.raises(ModelError, match=r"answered 400 after 1 try.*unknown parameter") as other:
        await ask(stub)
    assert not other.value.retryable


async def test_endpoint_retries_are_bounded_and_told(stub: ModelStub) -> None:
    """P51: an endpoint that always answers 429, one that fails twice, one that refuses connections."""
    stub.answer = lambda request: error_reply(429, "slow down", {"Retry-After-Ms": "1"})
    with pytest.raises(ModelError, match=r"answered 429 after 3 tries.*slow down"):
        await ask(stub, max_retries=2)
    assert len(stub.requests) == 3

    failures = iter([500, 500])
    stub.answer = lambda request: (
        error_reply(status, headers={"Retry-After-Ms": "1"}) if (status := next(failures, None)) else completion()
    )
    assert (await ask(stub, max_retries=2)).message["content"] == "hello"


async def test_a_refused_connection_and_a_slow_answer_are_model_errors(stub: ModelStub) -> None:
    """P51."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ModelError, match="could not be reached after 1 try"):
            await ask(stub, api_base_url=dead)

    release = threading.Event()
    stub.answer = lambda request: (release.wait(20) and completion()) or completion()
    with pytest.raises(ModelError, match="did not answer in time after 1 try"):
        await ask(stub, timeout=0.1)
    release.set()


async def test_the_key_is_read_when_a_request_needs_it(stub: ModelStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: refused before any request, naming variable and host; later set, it is used."""
    monkeypatch.delenv("MY_LLM_KEY", raising=False)
    client = resolve_client(stub.config(api_key_var="MY_LLM_KEY", extra_headers={"X-Team": "blue"}))

    with pytest.raises(ModelKeyError, match="MY_LLM_KEY") as caught:
        await chat(client, "m", PROMPT)
    assert socket.gethostname() in str(caught.value)
    assert stub.requests == []

    monkeypatch.setenv("MY_LLM_KEY", "secret")
    await chat(client, "m", PROMPT)
    assert stub.headers[0]["authorization"] == "Bearer secret"
    assert stub.headers[0]["x-team"] == "blue"


async def test_redirects_are_not_followed(stub: ModelStub) -> None:
    stub.answer = lambda request: (307, {"Location": f"{stub.url}/elsewhere"}, b"")

    with pytest.raises(ModelError):
        await ask(stub)
    assert len(stub.requests) == 1


async def test_other_headers_share_the_connections(stub: ModelStub) -> None:
    """A trainer that names each example in a header has one client, not one for each."""
    clients = ModelClients()
    for number in range(3):
        config = stub.config(extra_headers={"X-Session-ID": str(number)})
        await chat(clients.get(config), "m", PROMPT)
    await chat(clients.get(stub.config()), "m", PROMPT)
    assert [headers.get("x-session-id") for headers in stub.headers] == ["0", "1", "2", None]
    assert len({id(clients.get(stub.config(extra_headers={"X": str(n)}))._client) for n in range(3)}) == 1
    await clients.close()


async def test_a_key_source_decides_for_every_endpoint(stub: ModelStub) -> None:
    asked: list[str] = []

    def refuse(config: EndpointConfig) -> str:
        asked.append(config.api_base_url)
        raise ModelKeyError("not allowed here")

    clients = ModelClients(key_source=refuse)
    with pytest.raises(ModelKeyError, match="not allowed here"):
        await chat(clients.get(stub.config()), "m", PROMPT)
    assert asked == [stub.url]
    await clients.close()


async def test_clients_are_cached_bounded_and_closed(stub: ModelStub) -> None:
    clients = ModelClients(max_clients=2)
    first = clients.get(stub.config())
    assert clients.get(stub.config()) is first
    assert clients.get(EndpointConfig(**stub.config().model_dump(include=set(EndpointConfig.model_fields)))) is first

    clients.get(stub.config(timeout=1))
    clients.get(stub.config(timeout=2))
    assert clients.get(stub.config()) is not first

    await chat(first, "m", PROMPT)  # a rollout that has it keeps it
    await clients.close()
    assert first.is_closed()


async def test_a_client_that_was_let_go_is_closed_with_its_last_user(stub: ModelStub) -> None:
    """Callers whose settings differ from call to call leave no open connections behind, nor cut others off."""
    clients = ModelClients(max_clients=1)
    ring = ClientConfig(endpoint_configs=(EndpointConfig(api_base_url=stub.url, api_key_var=None),))
    in_use: Any = clients.get(ring)
    await chat(in_use, "m", PROMPT)
    connections: Any = in_use._client
    clients.get(stub.config(timeout=1))
    gc.collect()
    assert not connections.is_closed
    del in_use
    gc.collect()
    for _ in range(1000):
        if connections.is_closed:
            break
        await asyncio.sleep(0.01)
    assert connections.is_closed
    await clients.close()


def test_every_event_loop_has_its_own_client(sync_stub: ModelStub) -> None:
    seen = []

    async def main() -> None:
        seen.append(resolve_client(sync_stub.config()))
        await chat(seen[-1], "m", PROMPT)
        await close_clients()

    asyncio.run(main())
    asyncio.run(main())
    assert seen[0] is not seen[1]


async def test_several_endpoints_take_turns(stub: ModelStub) -> None:
    endpoints = [EndpointConfig(api_base_url=f"{stub.url}/{name}", api_key_var=None) for name in "ab"]
    config = ClientConfig(endpoint_configs=tuple(endpoints))

    urls = [str(resolve_client(config).base_url).rstrip("/")[-1] for _ in range(4)]

    assert urls == ["a", "b", "a", "b"]


async def test_other_clients_pass_through() -> None:
    thing = object()

    assert resolve_client(thing) is thing
    assert resolve_client(None) is None


async def test_an_env_without_model_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: envs that use no model still run."""
    monkeypatch.delenv("MY_LLM_KEY", raising=False)

    class NoModelEnv(SingleTurnEnv):
        async def is_completed(self, state: Any) -> bool:
            return True

    env = NoModelEnv(dataset=[{"question": "q"}], rubric=Rubric([lambda: 1.0]))
    output = await env.run_rollout(env.eval_examples()[0], ClientConfig(api_key_var="MY_LLM_KEY"), "m")
    assert output["reward"] == 1.0
    await close_clients()
