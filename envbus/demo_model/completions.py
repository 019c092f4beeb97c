"""Chat completions as an OpenAI-compatible endpoint words them, whole or in stream chunks (pure).

Tokens are short pieces of the text; their ids and log-probabilities are made up but fixed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

from envbus.demo_model.answers import Answer
from envbus.demo_model.http import HttpError

_PIECE = re.compile(r"\s*\w{1,5}|\s*[^\w\s]|\s+")
_VOCABULARY = 32_000


def tokenize(text: str) -> list[str]:
    """Cut text into pieces that join to the same text."""
    return _PIECE.findall(text)


def token_id(piece: str) -> int:
    """The made-up id of a piece."""
    return zlib.crc32(piece.encode("utf-8", "surrogatepass")) % _VOCABULARY


class Completion:
    """One answer to one request body.

    Raises:
        HttpError: Prompt and wanted tokens are over the context length.
    """

    def __init__(self, request: dict[str, Any], answer: Answer, *, completion_id: str, context_length: int) -> None:
        self._request = request
        self._id = completion_id
        rendered = json.dumps([request["messages"], request.get("tools") or []], ensure_ascii=False)
        self._prompt_pieces = tokenize(rendered)
        max_tokens = request.get("max_completion_tokens") or request.get("max_tokens")
        self._check_length(max_tokens or 0, context_length)
        self._fill(answer, max_tokens)

    def body(self) -> dict[str, Any]:
        """The response of a call without streaming."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text or None, "refusal": None}
        if not self._tool_calls:
            message["content"] = self._text
        else:
            message["tool_calls"] = self._tool_calls
        choice = self._choice(self._pieces) | {"message": message, "finish_reason": self._finish_reason}
        return self._envelope("chat.completion", [choice]) | self._prompt_ids() | {"usage": self._usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The events of a streamed call, without the closing ``[DONE]``."""
        yield self._chunk({"role": "assistant", "content": ""}, []) | self._prompt_ids()
        if self._tool_calls:
            calls = [{"index": i, **call} for i, call in enumerate(self._tool_calls)]
            yield self._chunk({"tool_calls": calls}, self._pieces)
        else:
            for piece in self._pieces:
                yield self._chunk({"content": piece}, [piece])
        yield self._chunk({}, [], finish_reason=self._finish_reason)
        if (self._request.get("stream_options") or {}).get("include_usage"):
            yield self._envelope("chat.completion.chunk", []) | {"usage": self._usage()}

    def _check_length(self, wanted: int, context_length: int) -> None:
        used = len(self._prompt_pieces)
        if used + max(wanted, 1) > context_length:
            raise HttpError(
                400,
                f"This model's maximum context length is {context_length} tokens. However, you requested "
                f"{used + wanted} tokens ({used} in the messages, {wanted} in the completion). "
                "Please reduce the length of the messages or completion.",
                code="context_length_exceeded",
            )

    def _fill(self, answer: Answer, max_tokens: int | None) -> None:
        self._text = answer.text
        self._tool_calls = [
            {
                "id": f"call_{self._id[-12:]}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for i, call in enumerate(answer.tool_calls)
        ]
        written = answer.text + "".join(json.dumps(call["function"]) for call in self._tool_calls)
        self._pieces = tokenize(written)
        self._finish_reason = "tool_calls" if self._tool_calls else "stop"
        if max_tokens and len(self._pieces) > max_tokens:
            self._pieces = self._pieces[:max_tokens]
            self._text, self._tool_calls, self._finish_reason = "".join(self._pieces), [], "length"

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # created is fixed, so that the same request gives the same bytes
        return {"id": self._id, "object": kind, "created": 0, "model": self._request["model"], "choices": choices}

    def _chunk(self, delta: dict[str, Any], pieces: list[str], finish_reason: str | None = None) -> dict[str, Any]:
        choice = self._choice(pieces) | {"delta": delta, "finish_reason": finish_reason}
        return self._envelope("chat.completion.chunk", [choice])

    def _choice(self, pieces: list[str]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        if self._request.get("logprobs") and pieces:
            choice["logprobs"] = {"content": [self._logprob(piece) for piece in pieces], "refusal": None}
        if self._request.get("return_token_ids"):
            choice["token_ids"] = [token_id(piece) for piece in pieces]
        return choice

    def _logprob(self, piece: str) -> dict[str, Any]:
        entry = {
            "token": piece,
            "logprob": -(token_id(piece) % 97) / 50,
            "bytes": list(piece.encode("utf-8", "surrogatepass")),
        }
        return entry | {"top_logprobs": [dict(entry)] if self._request.get("top_logprobs") else []}

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._request.get("return_token_ids"):
            return {}
        return {"prompt_token_ids": [token_id(piece) for piece in self._prompt_pieces]}

    def _usage(self) -> dict[str, int]:
        used, written = len(self._prompt_pieces), len(self._pieces)
        return {"prompt_tokens": used, "completion_tokens": written, "total_tokens": used + written}
