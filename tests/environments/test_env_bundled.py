"""The bundled environments, offline."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from env_model_stub import ModelStub, completion, tool_call

from envbus.environments import load_environment
from envbus.environments.bundled import calculator, gsm8k, guess_number
from envbus.errors import EnvArgsError


async def rolled(env: Any, stub: ModelStub, row: int = 0) -> dict[str, Any]:
    return dict(await env.run_rollout(env.eval_examples()[row], stub.config(), "m"))


@pytest.mark.parametrize("env_id", ["reverse-text", "calculator", "guess-number", "reasoning-gym"])
def test_data_is_deterministic_and_sets_are_apart(env_id: str) -> None:
    if env_id == "reasoning-gym":
        pytest.importorskip("reasoning_gym")
    env, again = (load_environment(env_id, num_train_examples=20, num_eval_examples=5) for _ in range(2))

    assert env.eval_examples() == again.eval_examples()
    assert env.get_dataset() == again.get_dataset()
    assert (len(env.get_dataset()), len(env.eval_examples())) == (20, 5)
    if env_id != "guess-number":
        assert not {row["question"] for row in env.get_dataset()} & {row["question"] for row in env.eval_examples()}


async def test_reverse_text_gives_partial_rewards(stub: ModelStub) -> None:
    env = load_environment("reverse-text", num_eval_examples=3)
    text = env.eval_examples()[0]["question"]
    rewards = []
    for answer in (text[::-1], text[::-1][5:], "", text * 100):
        stub.answer = lambda request, answer=answer: completion(f"<reversed_text>{answer}</reversed_text>")
        rewards.append((await rolled(env, stub))["reward"])
    stub.answer = lambda request: completion("no tags")
    rewards.append((await rolled(env, stub))["reward"])

    assert rewards[0] == 1.0
    assert 0.5 < rewards[1] < 1.0
    assert rewards[2] == rewards[4] == 0.0
    assert rewards[3] < 0.8


async def test_calculator_uses_its_tool(stub: ModelStub) -> None:
    env = load_environment("calculator", num_eval_examples=2)
    expression = env.eval_examples()[0]["question"].removeprefix("What is ").rstrip("?")

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        last = request["messages"][-1]
        if last["role"] == "tool":
            return completion(f"It is {int(last['content']):,}.")
        return completion(None, tool_calls=[tool_call("calculate", {"expression": expression})])

    stub.answer = answer
    output = await rolled(env, stub)

    assert output["reward"] == 1.0
    assert output["metrics"]["used_calculator"] == 1.0
    assert output["metrics"]["calculate_calls"] == 1.0


@pytest.mark.parametrize(("text", "value"), [("2 + 3 * -4", -10), (" (1+2)*3 ", 9), ("-(-5)", 5)])
def test_calculate(text: str, value: int) -> None:
    assert calculator.calculate(text) == value


@pytest.mark.parametrize("text", ["2 ** 9", "1 / 2", "x", "True + 1", "1.5", "f()", "'a'", "+1", "1+" * 200, ""])
def test_calculate_refuses_everything_else(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculator.calculate(text)


async def test_guess_number_is_won_by_halving(stub: ModelStub) -> None:
    env = load_environment("guess-number")

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        low, high = 1, 100
        for message in request["messages"][1:]:
            if message["role"] == "assistant":
                guess = (low + high) // 2
            else:
                low, high = (guess + 1, high) if message["content"] == "Higher." else (low, guess - 1)
        return completion(f"<guess>{(low + high) // 2}</guess>")

    stub.answer = answer
    outputs = [await rolled(env, stub, row) for row in range(5)]

    assert [output["reward"] for output in outputs] == [1.0] * 5
    assert {output["stop_condition"] for output in outputs} == {"has_final_env_response"}
    assert all(output["completion"][-1]["content"].startswith("Yes") for output in outputs)


async def test_guess_number_can_be_lost(stub: ModelStub) -> None:
    env = load_environment("guess-number", max_turns=3)
    stub.answer = lambda request: completion("I think it is 5")

    output = await rolled(env, stub)

    assert (output["reward"], output["stop_condition"]) == (0.0, "max_turns_reached")
    assert "I need a guess" in output["completion"][1]["content"]


def test_guess_number_rewards_shrink_with_guesses() -> None:
    def reward(guesses: list[int]) -> float:
        dialogue = [{"role": "assistant", "content": f"<guess>{guess}</guess>"} for guess in guesses]
        return guess_number.few_guesses(dialogue, "5", {"highest": 100})

    assert reward([5]) == reward([1, 2, 3, 4, 6, 7, 5]) == 1.0
    assert reward([1] * 13 + [5]) == 0.5
    assert reward([1]) == 0.0


async def test_reasoning_gym_scores_with_the_task(stub: ModelStub) -> None:
    pytest.importorskip("reasoning_gym")
    env = load_environment("reasoning-gym", task="chain_sum", num_train_examples=3, num_eval_examples=2)
    row = json.loads(json.dumps(env.eval_examples()[1]))  # as it comes over the bus
    stub.answer = lambda request: completion(f"<answer>{row['answer']}</answer>")

    assert (await env.run_rollout(row, stub.config(), "m"))["reward"] == 1.0
    assert (await rolled(env, stub, 0))["reward"] < 1.0


MIXTURE: list[Any] = ["leg_counting", {"task": "chain_sum", "weight": 2, "task_args": {"min_terms": 3, "max_terms": 3}}]


async def test_reasoning_gym_mixes_tasks(stub: ModelStub) -> None:
    """Each example is scored by its own task; settings and weights reach the generators."""
    pytest.importorskip("reasoning_gym")
    sizes = {"num_train_examples": 30, "num_eval_examples": 10}
    env = load_environment("reasoning-gym", tasks=MIXTURE, **sizes)
    other_seed = load_environment("reasoning-gym", tasks=MIXTURE, **sizes, seed=1)
    rows = [*env.get_dataset(), *env.eval_examples()]
    assert {row["info"]["task"] for row in rows} == {"leg_counting", "chain_sum"}
    assert all(len(re.findall(r" [+-] ", r["question"])) == 2 for r in rows if r["info"]["task"] == "chain_sum")
    assert len({row["question"] for row in rows}) == len(rows)
    assert [row["question"] for row in rows[:30]] != [row["question"] for row in other_seed.get_dataset()]
    for row in env.eval_examples():
        stub.answer = lambda request, row=row: completion(f"<answer>{row['answer']}</answer>")
        assert (await env.run_rollout(row, stub.config(), "m"))["reward"] == 1.0

    only = load_environment("reasoning-gym", tasks=[{"task": "chain_sum", "weight": 1e-9}, "leg_counting"], **sizes)
    assert {row["info"]["task"] for row in only.get_dataset()} == {"leg_counting"}


async def test_reasoning_gym_scores_an_answer_of_the_wrong_form(stub: ModelStub) -> None:
    """The task's own score raises ValueError at this one: a wrong answer, not a failed rollout."""
    pytest.importorskip("reasoning_gym")
    env = load_environment("reasoning-gym", task="prime_factorization", num_train_examples=1, num_eval_examples=1)
    stub.answer = lambda request: completion("<answer>two times three</answer>")
    output = await rolled(env, stub)
    assert (output["reward"], output["error"]) == (0.0, None)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"task": "no_such_task"}, "refuses task 'no_such_task'"),
        ({"task": "chain_sum", "task_args": {"min_terms": 9, "max_terms": 2}}, "refuses task 'chain_sum'"),
        ({"task": "chain_sum", "task_args": {"no_such": 1}}, "no_such"),
        ({"tasks": []}, "at least one"),
        ({"tasks": ["chain_sum", "chain_sum"]}, "names another task"),
        ({"tasks": [{"task": "chain_sum", "size": 3}]}, "not size"),
        ({"tasks": ["chain_sum", "no_such_task"]}, "refuses task 'no_such_task'"),
    ],
)
def test_reasoning_gym_refuses_what_it_does_not_have(arguments: dict[str, Any], word: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(EnvArgsError, match=word):
        load_environment("reasoning-gym", **arguments)


@pytest.fixture
def gsm8k_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that datasets.load_dataset("openai/gsm8k") finds before the hub."""
    folder = tmp_path / "openai" / "gsm8k"
    (folder / "main").mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    for split, answers in {"train": ["1,234", "5"], "test": ["18"]}.items():
        rows = [{"question": f"{split}?", "answer": f"Some <<1+1=2>> steps\n#### {answer}"} for answer in answers]
        (folder / "main" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("gsm8k_folder")
async def test_gsm8k(stub: ModelStub) -> None:
    env = load_environment("gsm8k")

    assert [row["answer"] for row in env.get_dataset()] == ["1234", "5"]
    assert len(load_environment("gsm8k", num_train_examples=1).get_dataset()) == 1
    stub.answer = lambda request: completion("<think>\\boxed{3}</think> so \\boxed{\\frac{36}{2}}")
    output = await rolled(env, stub)
    assert output["reward"] == 1.0
    assert re.search("boxed", output["prompt"][0]["content"])
    for text in ("18", "\\boxed{19}", "\\boxed{", "\\boxed{}"):
        stub.answer = lambda request, text=text: completion(text)
        assert (await rolled(env, stub))["reward"] == 0.0


def test_gsm8k_scores_outside_the_main_thread() -> None:
    """math-verify's own timeouts are signals, which only work in the main thread."""
    rewards: list[float] = []
    dialogue = [{"role": "assistant", "content": "\\boxed{1,234}"}]
    scorer = threading.Thread(
        target=lambda: rewards.append(gsm8k.correct_answer(dialogue, "1234", gsm8k.ThinkParser(gsm8k.last_boxed)))
    )
    scorer.start()
    scorer.join()

    assert rewards == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "99999999!",
        "\\binom{1000000}{500000}",
        "\\prod_{i=1}^{999999} i",
        "9**9**9",
        "9* *9",
        "(a+b)" * 30,
        "1" * 201,
        "\\sqrt{2}",
        "factorial(9999)",
    ],
)
def test_gsm8k_never_verifies_what_may_take_for_ever(text: str) -> None:
    dialogue = [{"role": "assistant", "content": f"\\boxed{{{text}}}"}]

    assert not gsm8k.is_arithmetic(text)
    assert gsm8k.correct_answer(dialogue, "1234", gsm8k.ThinkParser(gsm8k.last_boxed)) == 0.0


@pytest.mark.parametrize(
    "text", ["18", "18.0", "\\$18", "x = 18", "\\dfrac{36}{2}", "18 \\text{ apples}", "9 \\times 2"]
)
def test_gsm8k_accepts_equal_answers(text: str) -> None:
    dialogue = [{"role": "assistant", "content": f"\\boxed{{{text}}}"}]

    assert gsm8k.correct_answer(dialogue, "18", gsm8k.ThinkParser(gsm8k.last_boxed)) == 1.0


@pytest.mark.parametrize(
    ("text", "boxed"),
    [("\\boxed{1} \\boxed{a{b}c}", "a{b}c"), ("none", None), ("\\boxed{open", None), ("\\boxed{" + "{" * 50_000, None)],
    ids=["nested", "none", "open", "long"],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert gsm8k.last_boxed(text) == boxed


def test_sync_evaluation(sync_stub: ModelStub) -> None:
    sync_stub.answer = lambda request: completion("<reversed_text>x</reversed_text>")
    env = load_environment("reverse-text", num_eval_examples=2)

    results = env.evaluate_sync(sync_stub.config(), "m", rollouts_per_example=2)

    assert [output["example_id"] for output in results["outputs"]] == [0, 0, 1, 1]
    assert results["metadata"]["env_id"] == "reverse-text"
    assert results["metadata"]["num_failed"] == 0

    async def in_a_notebook() -> Any:
        return env.evaluate_sync(sync_stub.config(), "m", num_examples=1)

    assert len(asyncio.run(in_a_notebook())["outputs"]) == 1
