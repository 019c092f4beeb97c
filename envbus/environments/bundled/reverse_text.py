"""reverse-text: write a text backwards, character by character. Works offline.

Data: English sentences, one a line, in ``data/reverse_text.txt`` of this package. Reward: similarity of the answer
and the reversed text, from 0 to 1 (1 only if they are equal).
"""

from __future__ import annotations

from difflib import SequenceMatcher
from importlib.resources import files

from envbus.environments import Parser, Rubric, SingleTurnEnv, XMLParser
from envbus.types import Messages

SYSTEM_PROMPT = "Reverse the text character by character. Put only your answer in <reversed_text> tags."


def load_environment(num_train_examples: int = -1, num_eval_examples: int = -1) -> SingleTurnEnv:
    """The environment.

    Args:
        num_train_examples: Size of the training set; all if negative.
        num_eval_examples: Size of the evaluation set; all if negative. The two sets have no text in common.
    """
    parser = XMLParser(["reversed_text"], answer_field="reversed_text")
    texts = files(__package__).joinpath("data", "reverse_text.txt").read_text("utf-8").splitlines()
    return SingleTurnEnv(
        dataset=_rows(texts[0::2], num_train_examples),
        eval_dataset=_rows(texts[1::2], num_eval_examples),
        system_prompt=SYSTEM_PROMPT,
        rubric=Rubric([similarity], parser=parser),
    )


def similarity(completion: Messages, answer: str, parser: Parser) -> float:
    """Twice the number of matching characters, in order, over the length of both texts together."""
    given = parser.parse_answer(completion) or ""
    return SequenceMatcher(None, given[: 4 * len(answer)], answer, autojunk=False).ratio()


def _rows(texts: list[str], limit: int) -> list[dict[str, str]]:
    chosen = texts if limit < 0 else texts[:limit]
    return [{"question": text, "answer": text[::-1]} for text in chosen]
