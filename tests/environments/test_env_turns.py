"""SingleTurnEnv and MultiTurnEnv over a loopback endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from env_model_stub import ModelStub, completion, error_reply

from envbus.environments import MultiTurnEnv, Rubric, SingleTurnEnv, State, XMLParser, stop
from envbus.types import Messages

ROWS = [{"question": "What is 2 + 2?", "answer": "4"}]


def exact(completion: Messages, answer: str, parser: XMLParser) -> float:
    return float(parser.parse_answer(completion) == answer)


def single(**settings: Any) -> SingleTurnEnv:
    rubric = Rubric([exact], parser=XMLParser(["answer"]))
    return SingleTurnEnv(dataset=ROWS, rubric=rubric, system_prompt="sys", **settings)


class EchoEnv(MultiTurnEnv):
    def __init__(self, responses: list[Any], **settings: Any) -> None:
        super().__init__(dataset=ROWS, rubric=Rubric([lambda: 1.0]), **settings)
        self.responses = responses

    async def env_response(self, messages: Messages, state: State) -> Any:
        response = self.responses[state["turn"] - 1]
        if isinstance(response, Exception):
            raise response
        if response == "end":
            state["final_env_response"] = [{"role": "user", "content": "bye"}]
            return []
        return response

    @stop
    async def said_stop(self, state: State) -> bool:
        return bool(state["completion"]) and state["completion"][-1]["content"] == "stop"


async def rolled(env: MultiTurnEnv, stub: ModelStub, **settings: Any) -> dict[str, Any]:
    return dict(await env.run_rollout(env.eval_examples()[0], stub.config(), "m", **settings))


async def test_a_single_turn(stub: ModelStub) -> None:
    stub.answer = lambda request: completion("<answer>4</answer>", finish_reason="length")

    output = await rolled(single(sampling_args={"temperature": 0.5, "max_tokens": 3}), stub, sampling_args={"top_p": 1})

    assert output["reward"] == 1.0
    assert output["metrics"] == {"exact": 1.0, "num_turns": 1.0}
    assert output["completion"] == [{"role": "assistant", "content": "<answer>4</answer>"}]
    assert [message["role"] for message in output["prompt"]] == ["system", "user"]
    assert (output["stop_condition"], output["is_completed"]) == ("max_turns_reached", True)
    assert output["is_truncated"]
    assert output["token_usage"] == {"input_tokens": 7, "output_tokens": 3}
    assert output["timing"]["model_s"] > 0
    step = output["trajectory"][0]
    assert step["prompt"] == output["prompt"]
    assert step["response"]["choices"][0]["finish_reason"] == "length"
    request = stub.requests[0]
    assert (request["temperature"], request["max_completion_tokens"], request["top_p"]) == (0.5, 3, 1)


async def test_an_async_openai_client_works_too(stub: ModelStub) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=stub.url, api_key="k") as client:
        env = single()
        output = await env.run_rollout(env.eval_examples()[0], client, "m")

    assert output["reward"] == 0.0
    assert output["error"] is None


@pytest.mark.parametrize(("status", "kind"), [(401, "ModelError"), (500, "ModelServerError")])
async def test_a_model_failure_is_not_a_zero(stub: ModelStub, status: int, kind: str) -> None:
    """P02: an endpoint that fails gives an error, not an empty answer with reward 0."""
    stub.answer = lambda request: error_reply(status)

    output = await rolled(single(), stub)

    assert output["reward"] is None
    assert output["error"]["error"] == kind
    assert output["stop_condition"] == "has_error"


async def test_an_endpoint_that_dies_in_a_group(stub: ModelStub) -> None:
    """P02: answers twice, then refuses; run_group of 4."""
    answers = iter([completion("<answer>4</answer>")] * 2)
    stub.answer = lambda request: next(answers, None) or error_reply(503)
    env = single()

    outputs = await env.run_group(list(env.eval_examples()) * 4, stub.config(), "m")

    assert sorted(str(output["reward"]) for output in outputs) == ["1.0", "1.0", "None", "None"]
    assert sum(output["error"] is not None for output in outputs) == 2


@pytest.mark.usefixtures("quick_retries")
async def test_empty_answers_are_tried_again(stub: ModelStub) -> None:
    answers = iter([completion(""), completion("<answer>4</answer>")])
    stub.answer = lambda request: next(answers)

    assert (await rolled(single(), stub, max_retries=1))["reward"] == 1.0


async def test_a_dialogue(stub: ModelStub) -> None:
    texts = iter(["one", "two", "stop"])
    stub.answer = lambda request: completion(next(texts))
    env = EchoEnv(["again", [{"role": "user", "content": "more"}]])

    output = await rolled(env, stub)

    assert [m["content"] for m in output["completion"]] == ["one", "again", "two", "more", "stop"]
    assert output["stop_condition"] == "said_stop"
    assert output["metrics"]["num_turns"] == 3
    assert len(output["trajectory"][2]["prompt"]) == 5
    assert output["token_usage"] == {"input_tokens": 21, "output_tokens": 9}


async def test_limits_of_turns_and_tokens(stub: ModelStub) -> None:
    assert (await rolled(EchoEnv(["a"] * 9, max_turns=2), stub))["stop_condition"] == "max_turns_reached"
    env = EchoEnv(["a"] * 9)
    env.set_kwargs(max_total_completion_tokens=7)
    output = await rolled(env, stub)
    assert output["stop_condition"] == "max_total_completion_tokens_reached"
    assert output["metrics"]["num_turns"] == 3


async def test_a_last_word_of_the_environment(stub: ModelStub) -> None:
    output = await rolled(EchoEnv(["end"]), stub)

    assert [message["content"] for message in output["completion"]] == ["hello", "bye"]
    assert output["stop_condition"] == "has_final_env_response"
    assert len(stub.requests) == 1


async def test_what_was_generated_before_a_failure_is_kept(stub: ModelStub) -> None:
    output = await rolled(EchoEnv(["again", ValueError("broken")]), stub)

    assert output["error"]["error"] == "ValueError"
    assert len(output["trajectory"]) == 2
    assert [message["content"] for message in output["completion"]] == ["hello", "again", "hello"]


async def test_a_prompt_that_outgrows_the_context_ends_the_rollout(stub: ModelStub) -> None:
    overlong = error_reply(400, "prompt is too long: exceeds the model's context length")
    answers = iter([completion()])
    stub.answer = lambda request: next(answers, overlong)

    output = await rolled(EchoEnv(["again"]), stub)

    assert (output["reward"], output["error"]) == (1.0, None)
    assert (output["stop_condition"], output["is_truncated"]) == ("prompt_too_long", True)


async def test_a_prompt_that_never_fitted_is_an_error(stub: ModelStub) -> None:
    stub.answer = lambda request: error_reply(400, "exceeds the model's context length")

    output = await rolled(EchoEnv(["again"]), stub)

    assert output["reward"] is None
    assert output["error"]["error"] == "OverlongPromptError"
    assert not output["error"]["retryable"]


async def test_malformed_env_responses_are_errors(stub: ModelStub) -> None:
    output = await rolled(EchoEnv([[1, 2]]), stub)

    assert output["error"]["error"] == "UsageError"
