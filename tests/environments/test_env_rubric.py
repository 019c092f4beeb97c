from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from envbus.environments import Parser, Rubric, RubricGroup, State, ThinkParser, XMLParser, cleanup, teardown
from envbus.environments.rubric import is_group_function
from envbus.environments.state import new_state
from envbus.errors import ScoringError, UsageError


def state(**columns: Any) -> State:
    return new_state({"prompt": "q", "example_id": 0, "answer": "4", "info": {"k": 1}, **columns})


async def reward_of(*funcs: Any, weights: list[float] | None = None, **columns: Any) -> State:
    scored = state(**columns)
    await Rubric(funcs, weights).score_rollout(scored)
    return scored


async def test_weights_metrics_and_names() -> None:
    async def half(answer: str) -> float:
        return 0.5

    def length(answer: str) -> int:
        return len(answer)

    scored = await reward_of(half, length, weights=[2.0, 0.0])

    assert scored["reward"] == 1.0
    assert scored["metrics"] == {"half": 0.5, "length": 1.0}


async def test_functions_get_what_they_name() -> None:
    seen: dict[str, Any] = {}

    def named(info: Any, colour: str, parser: Parser, judge: str, missing: int = 7) -> float:
        seen.update(info=info, colour=colour, parser=parser, judge=judge, missing=missing)
        return 1.0

    def everything(**kwargs: Any) -> float:
        seen["all"] = set(kwargs)
        return 1.0

    rubric = Rubric([named, everything])
    rubric.add_class_object("judge", "j")
    await rubric.score_rollout(state(colour="red"))

    assert seen["info"] == {"k": 1}
    assert (seen["colour"], seen["judge"], seen["missing"]) == ("red", "j", 7)
    assert seen["parser"] is rubric.parser
    assert seen["all"] >= {"prompt", "completion", "answer", "info", "state", "parser", "judge", "colour"}


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array([3.0]), 3.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
    ],
    ids=repr,
)
async def test_numbers_become_floats(value: Any, reward: float) -> None:
    scored = await reward_of(lambda: value)

    assert scored["reward"] == reward
    assert type(scored["reward"]) is float


@pytest.mark.parametrize("value", [None, "0.5", [1.0], np.array([1.0, 2.0]), 10**400, 1j, {}], ids=lambda v: str(v)[:9])
async def test_what_is_no_number_is_an_error(value: Any) -> None:
    with pytest.raises(ScoringError, match="not a number"):
        await reward_of(lambda: value)


async def test_a_missing_argument_is_an_error_with_its_cause() -> None:
    def needs(reference: str) -> float:
        return 1.0

    with pytest.raises(ScoringError, match="needs") as caught:
        await reward_of(needs)
    assert isinstance(caught.value.__cause__, TypeError)


def test_group_functions_are_told_by_parameters_or_annotation() -> None:
    def by_string(state: State) -> list[float]:
        return []

    def by_type(state): ...  # type: ignore[no-untyped-def]

    by_type.__annotations__["return"] = list[float]

    assert is_group_function(by_string)
    assert is_group_function(by_type)
    assert is_group_function(lambda completions: [])
    assert not is_group_function(lambda completion, **kwargs: 1.0)


def test_weights_must_fit() -> None:
    with pytest.raises(UsageError, match="as many weights"):
        Rubric([lambda: 1.0], [1.0, 2.0])


async def test_group_functions_add_to_individual_ones() -> None:
    async def longest(answers: list[str]) -> list[float]:
        return [float(answer == max(answers, key=len)) for answer in answers]

    states = [state(answer="a"), state(answer="abc")]
    await Rubric([lambda: 1.0, longest], [1.0, 0.5]).score_group(states)

    assert [scored["reward"] for scored in states] == [1.0, 1.5]
    assert states[1]["metrics"]["longest"] == 1.0


async def test_a_bad_value_in_a_group_fails_that_member_only() -> None:
    states = [state(), state(), state()]
    await Rubric([lambda states: [1.0, None, 2.0]]).score_group(states)

    assert [scored["reward"] for scored in states if scored["error"] is None] == [1.0, 2.0]
    assert isinstance(states[1]["error"], ScoringError)


async def test_rubric_groups_add_up_and_keep_failures_apart() -> None:
    def grader(answer: str) -> float:
        return 1 / int(answer)

    group = RubricGroup([Rubric([grader]), Rubric([lambda states: [float(len(states))] * len(states)])])
    states = [state(answer="0"), state(answer="2")]
    assert group.has_group_rewards
    await group.score_group(states)

    assert states[0]["error"] is not None
    assert states[1]["reward"] == 1.5
    assert set(states[1]["metrics"]) == {"grader", "<lambda>"}


async def test_hooks_of_every_rubric_run() -> None:
    log: list[str] = []

    class Hooked(Rubric):
        @cleanup
        async def clean(self, state: State) -> None:
            log.append("cleanup")

        @teardown
        def shut(self) -> None:
            log.append("teardown")
            raise RuntimeError("x")

    group = RubricGroup([Hooked(), Hooked()])
    await group.cleanup(state())
    with pytest.raises(RuntimeError):
        await group.teardown()

    assert log == ["cleanup"] * 2 + ["teardown"] * 2


def test_parsers() -> None:
    dialogue = [
        {"role": "assistant", "content": "<answer>1</answer>"},
        {"role": "user", "content": "<answer>9</answer>"},
        {"role": "assistant", "content": [{"type": "text", "text": "<think>x</think> <answer> 2\n</answer>"}]},
    ]
    assert XMLParser(["think", ("code", "answer")]).parse_answer(dialogue) == "2"
    assert XMLParser([("code", "answer")]).parse("<code>a</code><code>b").code == "a"
    assert XMLParser(["answer"]).parse_answer("nothing") is None
    assert XMLParser(["think", ("code", "answer")]).get_format_str().splitlines()[3] == "<code>"
    assert ThinkParser().parse_answer("<think>1</think> two") == "two"
    assert ThinkParser(str.upper).parse_answer("two") == "TWO"
    assert Parser().parse_answer(dialogue[:2]) == "<answer>1</answer>"
    assert Parser().parse_answer([]) is None
