from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from env_model_stub import ModelStub, completion, tool_call
from pydantic import BaseModel

from envbus.environments import Rubric, ToolEnv
from envbus.environments.tool_schema import Tool
from envbus.errors import InfraError, ToolCallError, ToolParseError, UsageError


class Point(BaseModel):
    x: int


def add(a: int, b: int = 2, *, unit: Literal["m", "s"] | None = None) -> int:
    """Add two numbers.

    The second has a default.

    Args:
        a: The first number,
            told on two lines.
        b (int): The second.

    Returns:
        The sum.
    """
    return a + b


async def norm(point: Point) -> float:
    """Length."""
    return float(abs(point.x))


def test_definitions_come_from_signature_and_docstring() -> None:
    function = Tool.of(add).definition["function"]

    assert Tool.of(add).definition["type"] == "function"
    assert function["name"] == "add"
    assert function["description"] == "Add two numbers.\n\nThe second has a default."
    properties = function["parameters"]["properties"]
    assert properties["a"] == {"type": "integer", "description": "The first number, told on two lines."}
    assert properties["b"] == {"type": "integer", "default": 2, "description": "The second."}
    assert "m" in str(properties["unit"])
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["additionalProperties"] is False


def test_functions_without_docs_and_types() -> None:
    def bare(x): ...  # type: ignore[no-untyped-def]

    def nothing() -> None: ...

    assert Tool.of(bare).definition["function"]["parameters"]["required"] == ["x"]
    assert Tool.of(nothing).definition["function"]["parameters"]["properties"] == {}
    assert Tool.of(nothing).parse("") == {}


def test_what_cannot_be_a_tool_is_refused() -> None:
    with pytest.raises(UsageError, match="named function"):
        Tool.of(lambda x: x)
    with pytest.raises(UsageError, match="called by name"):
        Tool.of(print)


def test_arguments_are_converted_and_checked() -> None:
    assert Tool.of(add).parse('{"a": "3"}') == {"a": 3}
    assert Tool.of(norm).parse('{"point": {"x": 4}}') == {"point": Point(x=4)}
    for text in ('{"a": 1', "[1]", "5", '{"a": "x"}', '{"b": 1}', '{"a": 1, "c": 2}', "[" * 100_000):
        with pytest.raises(ToolParseError) as caught:
            Tool.of(add).parse(text)
        assert len(str(caught.value)) < 1_500


def calling(stub: ModelStub, *calls: dict[str, Any]) -> None:
    answers = iter([completion(None, tool_calls=list(calls)), completion("done")])
    stub.answer = lambda request: next(answers)


async def rolled(env: ToolEnv, stub: ModelStub) -> dict[str, Any]:
    return dict(await env.run_rollout(env.eval_examples()[0], stub.config(), "m"))


def tool_env(*tools: Any, **settings: Any) -> ToolEnv:
    return ToolEnv(tools=tools, dataset=[{"question": "q"}], rubric=Rubric([lambda: 1.0]), **settings)


def tool_texts(output: dict[str, Any]) -> list[str]:
    return [message["content"] for message in output["completion"] if message["role"] == "tool"]


async def test_calls_are_answered_until_there_are_none(stub: ModelStub) -> None:
    calling(stub, tool_call("add", {"a": 1}, "c1"), tool_call("norm", {"point": {"x": -3}}, "c2"))

    output = await rolled(tool_env(add, norm), stub)

    assert tool_texts(output) == ["3", "3.0"]
    assert [m["tool_call_id"] for m in output["completion"] if m["role"] == "tool"] == ["c1", "c2"]
    assert output["stop_condition"] == "no_tools_called"
    metrics = output["metrics"]
    assert (metrics["total_tool_calls"], metrics["add_calls"], metrics["norm_calls"]) == (2, 1, 1)
    assert [tool["function"]["name"] for tool in output["tool_defs"]] == ["add", "norm"]
    assert stub.requests[0]["tools"] == output["tool_defs"]


async def test_calls_of_one_message_run_at_the_same_time(stub: ModelStub) -> None:
    here: list[int] = []
    both = asyncio.Event()

    async def meet(n: int) -> str:
        here.append(n)
        if len(here) == 2:
            both.set()
        async with asyncio.timeout(20):
            await both.wait()
        return "met"

    calling(stub, tool_call("meet", {"n": 1}, "a"), tool_call("meet", {"n": 2}, "b"))

    assert tool_texts(await rolled(tool_env(meet), stub)) == ["met", "met"]


async def test_failures_are_told_to_the_model(stub: ModelStub) -> None:
    def broken() -> str:
        raise ValueError("no luck")

    calling(stub, tool_call("broken", {}), tool_call("broken", "{", "b"), tool_call("nope", {}, "c"))

    texts = tool_texts(await rolled(tool_env(broken), stub))

    assert texts[0] == "broken failed: ValueError: no luck"
    assert "not JSON" in texts[1]
    assert "there is no tool 'nope'" in texts[2]


@pytest.mark.parametrize("stop_error", [ValueError, ToolCallError])
async def test_stop_errors_end_the_rollout(stub: ModelStub, stop_error: type[Exception]) -> None:
    def broken() -> str:
        raise ValueError("no luck")

    calling(stub, tool_call("broken", {}))

    output = await rolled(tool_env(broken, stop_errors=[stop_error]), stub)

    assert output["reward"] is None
    assert output["error"]["error_chain_str"] == "ToolCallError -> ValueError"


async def test_broken_infrastructure_is_not_told_to_the_model(stub: ModelStub) -> None:
    """P02, P30: the model cannot help it, and the rollout is worth another try."""

    def sandbox() -> str:
        raise InfraError("gone")

    calling(stub, tool_call("sandbox", {}))

    output = await rolled(tool_env(sandbox), stub)

    assert output["error"]["error_chain_str"] == "ToolCallError -> InfraError"
    assert output["error"]["retryable"]


async def test_content_parts_pass_and_max_turns_holds(stub: ModelStub) -> None:
    def look() -> list[dict[str, str]]:
        return [{"type": "text", "text": "a picture"}]

    stub.answer = lambda request: completion(None, tool_calls=[tool_call("look", {})])

    output = await rolled(tool_env(look, max_turns=2), stub)

    assert output["stop_condition"] == "max_turns_reached"
    assert tool_texts(output) == [[{"type": "text", "text": "a picture"}]]
