"""What the demo model says: a table of rules, the first that fits a conversation answers (pure).

Answers are right more often than not and wrong often enough that rewards differ.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from envbus.demo_model.arithmetic import evaluate, find_expression, numbers_in

_RIGHT = 0.6
"""Share of right answers where the model knows one."""
_CLOSE = 0.8
"""Share of answers that are right or nearly so."""
_TAG = re.compile(r"<([a-z_]\w*)>", re.IGNORECASE)
_THOUGHT_TAGS = {"think", "thinking", "reasoning", "thought"}
_RANGE = re.compile(r"(?:between|from)\s+(-?\d+)\s+(?:and|to)\s+(-?\d+)|\b(\d+)\s*(?:-|\u2013|to)\s*(\d+)\b", re.I)
_GO_HIGHER = re.compile(r"\bhigher\b|\btoo (?:low|small)\b|\b(?:greater|larger|bigger)\b", re.IGNORECASE)
_GO_LOWER = re.compile(r"\blower\b|\btoo (?:high|large|big)\b|\b(?:less|smaller)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one of the offered tools."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model replies: text, or tool calls."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: who, and its text."""

    role: str
    text: str


class Conversation:
    """A request's messages as the rules look at them."""

    def __init__(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> None:
        self.turns = [Turn(str(message.get("role")), _text(message.get("content"))) for message in messages]
        self.functions: list[dict[str, Any]] = [tool["function"] for tool in tools if "function" in tool]

    @property
    def last(self) -> Turn:
        """The newest message."""
        return self.turns[-1]

    @property
    def question(self) -> str:
        """Text of the newest user message."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "user"), "")

    @property
    def task(self) -> str:
        """What says how to answer: the system prompt and the first user message."""
        first_user = next((turn.text for turn in self.turns if turn.role == "user"), "")
        return "\n".join([*(turn.text for turn in self.turns if turn.role in ("system", "developer")), first_user])


Rule = Callable[[Conversation, random.Random], Answer | None]


def answer(conversation: Conversation, rng: random.Random) -> Answer:
    """The reply of the first rule that fits."""
    return next(reply for rule in RULES if (reply := rule(conversation, rng)) is not None)


def report_tool_result(conversation: Conversation, rng: random.Random) -> Answer | None:
    """After a tool has answered: give its result, or misread it."""
    if conversation.last.role != "tool":
        return None
    result = conversation.last.text.strip()
    numbers = numbers_in(result)
    if not numbers:
        return styled(conversation, result)
    return styled(conversation, _maybe_wrong(numbers[-1], rng))


def call_tool(conversation: Conversation, rng: random.Random) -> Answer | None:
    """Where tools are offered: call the one that the question seems to name, with arguments taken from it."""
    if not conversation.functions or rng.random() > 0.9:
        return None
    words = set(re.findall(r"[a-z]+", conversation.question.lower()))

    def fit(function: dict[str, Any]) -> int:
        about = f"{function.get('name', '')} {function.get('description') or ''}".lower().replace("_", " ")
        return len(words & set(re.findall(r"[a-z]+", about)))

    function = max(conversation.functions, key=fit)
    return Answer(tool_calls=(ToolCall(function["name"], _arguments(function, conversation.question)),))


def guess_number(conversation: Conversation, rng: random.Random) -> Answer | None:
    """Guess-the-number: halve the range that the feedback leaves, now and then a hunch."""
    bounds = _RANGE.search(conversation.task)
    if bounds is None or not re.search(r"\bguess", conversation.task, re.IGNORECASE):
        return None
    low, high = sorted(int(bound) for bound in bounds.groups() if bound is not None)
    guess: int | None = None
    for turn in conversation.turns:
        if turn.role == "assistant":
            guess = int(numbers[-1]) if (numbers := numbers_in(turn.text)) else None
        elif guess is not None and _GO_HIGHER.search(turn.text):
            low = max(low, guess + 1)
        elif guess is not None and _GO_LOWER.search(turn.text):
            high = min(high, guess - 1)
    high = max(low, high)
    return styled(conversation, str((low + high) // 2 if rng.random() < _RIGHT else rng.randint(low, high)))


def reverse_text(conversation: Conversation, rng: random.Random) -> Answer | None:
    """Reverse the text, sometimes with a slip, sometimes by words where letters were meant."""
    if not re.search(r"\brevers(?:e|ed|ing)\b", conversation.task, re.IGNORECASE):
        return None
    text = conversation.question
    if re.search(r"\brevers(?:e|ed|ing)\b", text, re.IGNORECASE) and (rest := re.search(r":\s*(.+)", text, re.DOTALL)):
        text = rest[1]
    luck = rng.random()
    if luck > _CLOSE:
        return styled(conversation, " ".join(reversed(text.split())))
    letters = list(text.strip()[::-1])
    if luck > _RIGHT:
        at = rng.randint(0, max(0, len(letters) - 4))
        letters[at : at + 4] = letters[at : at + 4][::-1]
    return styled(conversation, "".join(letters))


def solve_arithmetic(conversation: Conversation, rng: random.Random) -> Answer | None:
    """An expression is worked out; of a word problem the numbers are combined in some way."""
    if expression := find_expression(conversation.question):
        return styled(conversation, _maybe_wrong(evaluate(expression) or "0", rng))
    numbers = numbers_in(conversation.question)
    if not numbers:
        return None
    expression = rng.choice([" + ", " * ", " - "]).join(numbers[:3])
    return styled(conversation, evaluate(expression) or numbers[0])


def small_talk(conversation: Conversation, rng: random.Random) -> Answer | None:
    """Anything else gets a sentence."""
    openers = ("I would say", "My best answer is", "As far as I can tell, it is")
    words = conversation.question.split() or ["nothing"]
    return styled(conversation, f"{rng.choice(openers)} {rng.choice(words)}.")


RULES: tuple[Rule, ...] = (
    report_tool_result,
    call_tool,
    guess_number,
    reverse_text,
    solve_arithmetic,
    small_talk,
)


def styled(conversation: Conversation, value: str) -> Answer:
    r"""The value in the form that the task asks for: ``\boxed{}``, XML-like tags, or bare."""
    if "\\boxed" in conversation.task:
        return Answer(f"The answer is \\boxed{{{value}}}.")
    tags = [tag for tag in _TAG.findall(conversation.task) if tag.lower() not in _THOUGHT_TAGS]
    if not tags:
        return Answer(value)
    tag = "answer" if "answer" in tags else tags[-1]
    return Answer(f"<{tag}>{value}</{tag}>")


def _maybe_wrong(value: str, rng: random.Random) -> str:
    if rng.random() < _RIGHT:
        return value
    return evaluate(f"{value} + {rng.randint(1, 9)}") or value


def _arguments(function: dict[str, Any], question: str) -> dict[str, Any]:
    schema = function.get("parameters") or {}
    properties: dict[str, Any] = schema.get("properties") or {}
    numbers = numbers_in(question)
    required = schema.get("required") or list(properties)
    return {name: _argument(properties.get(name) or {}, question, numbers) for name in required}


def _argument(schema: dict[str, Any], question: str, numbers: list[str]) -> Any:
    """A value of the schema's type, taken from the question; numbers are used up in order."""
    if choices := schema.get("enum"):
        return next((choice for choice in choices if str(choice).lower() in question.lower()), choices[0])
    kind = schema.get("type")
    if kind == "integer":
        return int(float(numbers.pop(0))) if numbers else 1
    if kind == "number":
        return float(numbers.pop(0)) if numbers else 1.0
    if kind == "array":
        return [_argument(schema.get("items") or {}, question, numbers) for _ in range(len(numbers))]
    if kind in ("boolean", "object"):
        return True if kind == "boolean" else {}
    quoted = re.search(r"[\"'`\u201c](.+?)[\"'`\u201d]", question)
    return find_expression(question) or (quoted[1] if quoted else question)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
