"""ToolEnv: a dialogue in which the model calls Python functions until it answers without a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from envbus.environments.hooks import settled, stop
from envbus.environments.multiturn_env import MultiTurnEnv
from envbus.environments.rubric import Rubric
from envbus.environments.state import State
from envbus.environments.tool_schema import Tool
from envbus.error_chain import ErrorChain
from envbus.errors import InfraError, ToolCallError, ToolError, ToolParseError
from envbus.types import Message, Messages


class ToolCallRubric(Rubric):
    """Reports how often tools were called: ``total_tool_calls`` and ``<tool>_calls``."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        super().__init__()
        self.add_metric(_call_counter("total_tool_calls", None))
        for tool in tools:
            self.add_metric(_call_counter(f"{tool.name}_calls", tool.name))


class ToolEnv(MultiTurnEnv):
    """Offers Python functions, sync or async, to the model as tools.

    The calls of one message run at the same time, plain functions on the event loop. A call that fails is told to
    the model as the tool's answer. It ends the rollout instead if ``stop_errors`` lists its error, or if the tool
    raised an InfraError: a broken sandbox is not the model's fault.

    Args:
        tools: The functions. Names, types and docstrings (Google form) become the tools' definitions.
        max_turns: Model calls at most.
        error_formatter: Makes the tool's answer from a ToolParseError or ToolCallError.
        stop_errors: Error classes that end the rollout, matched against the error and its causes.
        **settings: See Environment.
    """

    def __init__(
        self,
        tools: Iterable[Callable[..., Any]] = (),
        *,
        max_turns: int = 10,
        error_formatter: Callable[[ToolError], str] = str,
        stop_errors: Iterable[type[Exception]] = (),
        **settings: Any,
    ) -> None:
        made = [Tool.of(func) for func in tools]
        self.tools = {tool.name: tool for tool in made}
        self.error_formatter = error_formatter
        self.stop_errors: tuple[type[Exception], ...] = (InfraError, *stop_errors)
        super().__init__(max_turns=max_turns, tool_defs=[tool.definition for tool in made], **settings)
        self.add_rubric(ToolCallRubric(made))

    @stop
    async def no_tools_called(self, state: State) -> bool:
        """The model answered without calling a tool."""
        return bool(state["trajectory"]) and not _tool_calls(state["trajectory"][-1]["completion"])

    async def env_response(self, messages: Messages, state: State) -> Messages:
        """The answers of the tools that the last message calls."""
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(self._answer(call, state)) for call in messages[-1]["tool_calls"]]
        results = [answer.result() for answer in answers]
        for result in results:
            if isinstance(result, ToolError):
                raise result
        return [result for result in results if isinstance(result, dict)]

    async def call_tool(self, tool: Tool, arguments: dict[str, Any], state: State) -> Any:
        """Call a tool. Override to give tools more than the model's arguments, e.g. a handle from the state."""
        return await settled(tool.func(**arguments))

    async def _answer(self, call: dict[str, Any], state: State) -> Message | ToolError:
        name = call["function"]["name"]
        try:
            content = await self._called(name, call["function"]["arguments"], state)
        except ToolError as error:
            chain = ErrorChain(error)
            if any(error_class in chain for error_class in self.stop_errors):
                return error
            content = self.error_formatter(error)
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    async def _called(self, name: str, arguments: str, state: State) -> Any:
        tool = self.tools.get(name)
        if tool is None:
            raise ToolParseError(f"there is no tool {name[:100]!r}; the tools are: {', '.join(self.tools)}")
        parsed = tool.parse(arguments)
        try:
            result = await self.call_tool(tool, parsed, state)
        except Exception as error:
            raise ToolCallError(f"{name} failed: {type(error).__name__}: {error}") from error
        return result if _is_content(result) else str(result)


def _is_content(result: Any) -> bool:
    return isinstance(result, list) and bool(result) and all(isinstance(p, dict) and "type" in p for p in result)


def _tool_calls(messages: Messages) -> list[dict[str, Any]]:
    return [call for message in messages for call in message.get("tool_calls") or []]


def _call_counter(metric: str, tool_name: str | None) -> Callable[[Messages], int]:
    def count(completion: Messages) -> int:
        names = [call["function"]["name"] for call in _tool_calls(completion)]
        return len(names) if tool_name is None else names.count(tool_name)

    count.__name__ = metric
    return count
