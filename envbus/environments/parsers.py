"""Parsers: the answer in a completion's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from envbus.types import Messages


def message_text(message: dict[str, Any]) -> str:
    """The text of a message, whose content may be a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""


def _unchanged(text: str) -> str:
    return text


class Parser:
    """Takes the last assistant message as the answer.

    Args:
        extract_fn: Turns that text into the answer.
    """

    def __init__(self, extract_fn: Callable[[str], str | None] = _unchanged) -> None:
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        """The answer in a text."""
        return self.extract_fn(text)

    def get_assistant_messages(self, completion: Messages) -> Messages:
        """The model's messages of a completion."""
        return [message for message in completion if message.get("role") == "assistant"]

    def parse_answer(self, completion: Messages | str) -> str | None:
        """The answer in a completion, None if there is none."""
        if isinstance(completion, str):
            return self._answer(completion)
        messages = self.get_assistant_messages(completion)
        return self._answer(message_text(messages[-1])) if messages else None

    def _answer(self, text: str) -> str | None:
        answer: str | None = self.parse(text)
        return answer


class ThinkParser(Parser):
    """Ignores everything up to the last ``</think>``, whether or not the text has one."""

    def parse(self, text: str) -> Any:
        """The answer in the text behind the reasoning."""
        return super().parse(text.rpartition("</think>")[2].strip())


class XMLParser(Parser):
    """Reads tagged fields such as ``<answer>42</answer>``; the last one of a name counts.

    Args:
        fields: Tag names; a tuple lists alternatives, the first of which is the one to ask models for.
        answer_field: The tag that holds the answer.
        extract_fn: Turns the field's text into the answer.
    """

    def __init__(
        self,
        fields: Iterable[str | tuple[str, ...]],
        answer_field: str = "answer",
        extract_fn: Callable[[str], str | None] = _unchanged,
    ) -> None:
        super().__init__(extract_fn)
        self.fields = [(field,) if isinstance(field, str) else field for field in fields]
        self.answer_field = answer_field

    def parse(self, text: str) -> SimpleNamespace:
        """An object with one attribute for each tag name, None where the tag is missing."""
        names = [name for field in self.fields for name in field]
        return SimpleNamespace(**{name: self._last(name, text) for name in names})

    def get_format_str(self) -> str:
        """The format, to be put into a system prompt."""
        return "\n".join(f"<{field[0]}>\n...\n</{field[0]}>" for field in self.fields)

    def _last(self, name: str, text: str) -> str | None:
        found = re.findall(rf"<{re.escape(name)}>(.*?)</{re.escape(name)}>", text, re.DOTALL)
        return found[-1].strip() if found else None

    def _answer(self, text: str) -> str | None:
        field = getattr(self.parse(text), self.answer_field, None)
        return None if field is None else self.extract_fn(field)
