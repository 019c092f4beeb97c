"""MultiTurnEnv: model and environment take turns until a stop condition holds."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from envbus.environments import progress
from envbus.environments.environment import Environment
from envbus.environments.hooks import settled, stop
from envbus.environments.model_call import ChatResult
from envbus.environments.rubric import Rubric
from envbus.environments.state import State, as_messages
from envbus.errors import OverlongPromptError
from envbus.types import Messages, RolloutInput, SamplingArgs


class TurnCountRubric(Rubric):
    """Reports how many model calls a rollout made."""

    def __init__(self) -> None:
        super().__init__([self.num_turns], [0.0])

    def num_turns(self, state: State) -> int:
        """Model calls of the rollout."""
        return len(state["trajectory"])


class MultiTurnEnv(Environment):
    """A dialogue: implement ``env_response``, and stop conditions with ``@stop`` as needed.

    A prompt that outgrows the context after the first turn ends the rollout as truncated (stop condition
    ``prompt_too_long``) and it is scored as it is; one that never fitted is an error.

    Args:
        max_turns: Model calls at most; without limit if not positive.
        **settings: See Environment.
    """

    def __init__(self, *, max_turns: int = -1, **settings: Any) -> None:
        super().__init__(**settings)
        self.max_turns = max_turns
        self.max_total_completion_tokens = -1
        self.add_rubric(TurnCountRubric())

    @abstractmethod
    async def env_response(self, messages: Messages, state: State) -> Messages:
        """The environment's answer to the dialogue so far: messages, one message, or the text of a user message.

        Set ``state["final_env_response"]`` to messages to end the rollout with them.
        """

    @stop(priority=100)
    async def has_error(self, state: State) -> bool:
        """The environment set an error."""
        return state["error"] is not None

    @stop
    async def has_final_env_response(self, state: State) -> bool:
        """env_response said its last word."""
        return state["final_env_response"] is not None

    @stop
    async def max_turns_reached(self, state: State) -> bool:
        """max_turns model calls were made."""
        return bool(0 < self.max_turns <= state["turn"])

    @stop
    async def max_total_completion_tokens_reached(self, state: State) -> bool:
        """The model wrote max_total_completion_tokens, if that is set."""
        written = (state["token_usage"] or {}).get("output_tokens", 0)
        return bool(0 < self.max_total_completion_tokens <= written)

    @stop
    async def prompt_too_long(self, state: State) -> bool:
        """The dialogue outgrew the model's context."""
        return bool(state.get("prompt_too_long"))

    async def rollout(
        self, input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None = None
    ) -> State:
        """Set up, take turns, clean up."""
        state = self.init_state(input, client, model, sampling_args)
        await self.run_stages(state, self._take_turns)
        return state

    async def get_prompt_messages(self, state: State) -> Messages:
        """The next prompt: the dialogue so far and the environment's answer. Override for other shapes."""
        if not state["trajectory"]:
            return list(state["prompt"])
        last = state["trajectory"][-1]
        dialogue = [*last["prompt"], *last["completion"]]
        return [*dialogue, *as_messages(await settled(self.env_response(dialogue, state)))]

    async def add_trajectory_step(self, state: State, step: dict[str, Any]) -> None:
        """Override to give steps rewards or ``extras`` of their own."""
        state["trajectory"].append(step)

    async def render_completion(self, state: State) -> None:
        """Set ``completion``: everything after the first prompt."""
        if not state["trajectory"]:
            return
        last = state["trajectory"][-1]
        dialogue = [*last["prompt"], *last["completion"], *as_messages(state["final_env_response"] or [])]
        state["completion"] = dialogue[len(state["prompt"]) :]

    async def _take_turns(self, state: State) -> None:
        while not await self.is_completed(state):
            prompt = await self.get_prompt_messages(state)
            if state["error"] is None:
                if state["final_env_response"] is None:
                    await self._take_turn(state, prompt)
                else:
                    await _report(state, as_messages(state["final_env_response"]))
            await self.render_completion(state)

    async def _take_turn(self, state: State, prompt: Messages) -> None:
        try:
            result = await self.get_model_response(state, prompt)
        except OverlongPromptError:
            if not state["trajectory"]:
                raise
            state["prompt_too_long"] = state["is_truncated"] = True
            return
        await self.add_trajectory_step(state, _step(state, prompt, result))
        state["turn"] = len(state["trajectory"])
        state["is_truncated"] = state["is_truncated"] or result.is_truncated
        if progress.is_wanted():
            await _report(state, _new_messages(state["trajectory"]))


async def _report(state: State, messages: Messages) -> None:
    where = {"example_id": state["example_id"], "position": progress.position.get()}
    await progress.report({**where, "turn": state["turn"], "messages": messages})


def _new_messages(trajectory: list[dict[str, Any]]) -> Messages:
    """What the last step added to the dialogue; a prompt that does not go on from there is new as a whole."""
    last = trajectory[-1]
    before = [*trajectory[-2]["prompt"], *trajectory[-2]["completion"]] if len(trajectory) > 1 else last["prompt"]
    is_longer = last["prompt"][: len(before)] == before
    return [*(last["prompt"][len(before) :] if is_longer else last["prompt"]), *last["completion"]]


def _step(state: State, prompt: Messages, result: ChatResult) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "completion": [result.message],
        "response": result.response,
        "tokens": result.tokens,
        "reward": None,
        "advantage": None,
        "is_truncated": result.is_truncated,
        "trajectory_id": state["trajectory_id"],
        "extras": {},
    }
