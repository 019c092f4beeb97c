from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.environments import SingleTurnEnv
from envbus.errors import UsageError


def env(rows: Any, **settings: Any) -> SingleTurnEnv:
    return SingleTurnEnv(dataset=rows, **settings)


def ids(rows: Any, **settings: Any) -> list[Any]:
    return [row["example_id"] for row in env(rows, **settings).eval_examples()]


def test_prompts_are_made_of_system_prompt_few_shot_and_question() -> None:
    shots = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows: list[dict[str, Any]] = [
        {"question": "2+2"},
        {"prompt": [{"role": "user", "content": "ready"}]},
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]},
        {"prompt": "text"},
    ]
    prompts = [row["prompt"] for row in env(rows, system_prompt="sys", few_shot=shots).eval_examples()]

    assert [[message["content"] for message in prompt] for prompt in prompts] == [
        ["sys", "1+1", "2", "2+2"],
        ["sys", "ready"],
        ["own", "x"],
        ["sys", "text"],
    ]
    assert rows[0] == {"question": "2+2"}


def test_ids_are_kept_filled_in_and_unique() -> None:
    """P61: a text, a number, and none at all."""
    assert ids([{"question": "q", "example_id": value} for value in ("a-1", 7, 2.5)]) == ["a-1", 7, 2.5]
    assert ids([{"question": "q"}] * 3) == [0, 1, 2]
    mixed = ids([{"question": "q", "example_id": 1}, {"question": "q"}, {"question": "q"}, {"question": "q"}])
    assert mixed[0] == 1
    assert len(set(mixed)) == 4


@given(st.lists(st.none() | st.integers(-3, 12) | st.text(max_size=2), max_size=12))
def test_ids_are_unique_and_given_ones_kept(given_ids: list[Any]) -> None:
    """P61, for any mixture."""
    rows = [{"question": "q", "example_id": value} for value in given_ids]
    present = [value for value in given_ids if value is not None]
    if len(set(present)) < len(present):
        with pytest.raises(UsageError):
            ids(rows)
        return
    made = ids(rows)
    assert len(set(made)) == len(made) == len(given_ids)
    assert all(new == old for new, old in zip(made, given_ids, strict=True) if old is not None)


@pytest.mark.parametrize("repeated", [(1, 1), ("a", "a"), (1, True)])
def test_repeated_ids_are_refused(repeated: tuple[Any, Any]) -> None:
    """P61: results could not be told apart."""
    with pytest.raises(UsageError, match="rows 0 and 1"):
        env([{"question": "q", "example_id": value} for value in repeated])


@pytest.mark.parametrize("rows", [[{"question": "q", "example_id": [1]}], [{"text": "q"}], {"question": "q"}, 5])
def test_malformed_datasets_are_refused(rows: Any) -> None:
    with pytest.raises(UsageError):
        env(rows)


def test_a_dataset_is_needed() -> None:
    with pytest.raises(UsageError, match="dataset"):
        SingleTurnEnv()
    with pytest.raises(UsageError, match="no training dataset"):
        SingleTurnEnv(eval_dataset=[{"question": "q"}]).get_dataset()


def test_builders_run_on_first_use_and_once() -> None:
    calls = []
    lazy = env(lambda: calls.append(1) or [{"question": "q"}])  # type: ignore[func-returns-value]
    assert calls == []
    lazy.get_dataset()
    lazy.eval_examples()
    assert calls == [1]


def test_selection_makes_new_objects_and_never_shuffles_in_place() -> None:
    made = env([{"question": str(i)} for i in range(20)], eval_dataset=[{"question": "e"}])
    first = made.get_dataset()
    shuffled = made.get_dataset(5, seed=3)

    assert [row["question"] for row in shuffled] != [str(i) for i in range(5)]
    assert shuffled == made.get_dataset(5, seed=3)
    assert made.get_dataset() == first
    assert made.get_dataset() is not first
    assert made.get_dataset(0) == []
    assert len(made.get_dataset(99)) == 20
    assert made.get_eval_dataset()[0]["question"] == "e"


def test_a_hugging_face_dataset_stays_one() -> None:
    datasets = pytest.importorskip("datasets")
    source = datasets.Dataset.from_list([{"question": f"q{i}", "answer": "a", "info": {"i": i}} for i in range(5)])
    made = env(source, system_prompt="sys")

    chosen = made.get_dataset(3, seed=1)
    assert isinstance(chosen, datasets.Dataset)
    assert len(chosen) == 3
    rows = made.eval_examples()
    assert rows[4]["example_id"] == 4
    assert rows[4]["prompt"] == [{"role": "system", "content": "sys"}, {"role": "user", "content": "q4"}]
    assert rows[4]["info"] == {"i": 4}
    assert source.column_names == ["question", "answer", "info"]

    named = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "p"}], "example_id": "x"}])
    assert env(named).eval_examples()[0]["example_id"] == "x"
    with pytest.raises(UsageError, match="unique"):
        env(datasets.concatenate_datasets([named, named]))
