"""guess-number: find a secret number from "higher" and "lower". A game of several turns; works offline.

Data: secrets drawn from a seed. Reward: 0 if the number was not found; else 1 for at most as many guesses as halving
the range needs, and less for each further one.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

from envbus.environments import MultiTurnEnv, Rubric, State
from envbus.environments.parsers import message_text
from envbus.types import Info, Messages

RULES = "I have a secret number from 1 to {highest}. Guess it. Answer with <guess>your number</guess>."


class GuessNumberEnv(MultiTurnEnv):
    """Answers guesses until one is right."""

    async def env_response(self, messages: Messages, state: State) -> Messages:
        """Whether the secret is higher or lower than the last guess."""
        guesses = _guesses(messages[-1:])
        if not guesses:
            return [_user("I need a guess: <guess>your number</guess>.")]
        secret = int(state["answer"])
        if guesses[-1] == secret:
            state["final_env_response"] = [_user(f"Yes, it is {secret}.")]
            return []
        return [_user("Higher." if secret > guesses[-1] else "Lower.")]


def load_environment(
    highest: int = 100, num_train_examples: int = 500, num_eval_examples: int = 50, seed: int = 0, max_turns: int = 12
) -> GuessNumberEnv:
    """The environment.

    Args:
        highest: Secrets are from 1 to this number.
        num_train_examples: Size of the training set.
        num_eval_examples: Size of the evaluation set.
        seed: Seed of the training set; evaluation examples come from the next one.
        max_turns: Guesses at most.
    """
    return GuessNumberEnv(
        max_turns=max_turns,
        dataset=_games(num_train_examples, seed, highest),
        eval_dataset=_games(num_eval_examples, seed + 1, highest),
        rubric=Rubric([few_guesses, num_guesses], weights=[1.0, 0.0]),
    )


def few_guesses(completion: Messages, answer: str, info: Info) -> float:
    """1 for as few guesses as halving the range needs at most, less for each further one, 0 if not found."""
    guesses = _guesses(completion)
    needed = math.ceil(math.log2(info["highest"] + 1))
    return min(1.0, needed / len(guesses)) if int(answer) in guesses else 0.0


def num_guesses(completion: Messages) -> int:
    """Guesses that were made."""
    return len(_guesses(completion))


def _guesses(messages: Messages) -> list[int]:
    """The last guess of each message of the model that has one."""
    texts = [message_text(message) for message in messages if message["role"] == "assistant"]
    found = [re.findall(r"<guess>\s*(-?\d{1,9})\s*</guess>", text) for text in texts]
    return [int(numbers[-1]) for numbers in found if numbers]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _games(size: int, seed: int, highest: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rules = RULES.format(highest=highest)
    return [
        {"question": rules, "answer": str(rng.randint(1, highest)), "info": {"highest": highest}} for _ in range(size)
    ]
