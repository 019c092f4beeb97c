"""One chat completion: the request, the mapping of every failure to a RolloutError, and the answer as plain data."""

from __future__ import annotations

import inspect
import json
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from envbus.environments.model_tries import Tries, counted_tries, excerpt
from envbus.error_chain import ErrorChain
from envbus.errors import (
    EmptyModelResponseError,
    InvalidModelResponseError,
    ModelError,
    ModelRateLimitError,
    ModelServerError,
    ModelTimeoutError,
    ModelUnreachableError,
    OverlongPromptError,
    RolloutError,
)
from envbus.types import Message, Messages, SamplingArgs, StepTokens, TokenUsage

if TYPE_CHECKING:
    import openai
    from openai import AsyncOpenAI

OVERLONG_PHRASES = (
    "context length",
    "context_length",
    "context window",
    "maximum model length",
    "max_model_len",
    "prompt is too long",
    "prompt_too_long",
    "input is too long",
    "exceeds the configured limit",
)


@dataclass(frozen=True, slots=True)
class ChatResult:
    """What a model answered."""

    message: Message
    """The assistant message, ready to be part of the next prompt."""
    finish_reason: str | None
    usage: TokenUsage | None
    response: dict[str, Any]
    """The chat completion as the endpoint returned it, without fields that are null."""
    tokens: StepTokens | None

    @property
    def is_truncated(self) -> bool:
        """Whether the answer was cut off by its token limit."""
        return self.finish_reason == "length"


async def chat(
    client: AsyncOpenAI | None,
    model: str,
    messages: Messages,
    sampling_args: SamplingArgs | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> ChatResult:
    """Ask a model for one chat completion.

    Args:
        client: The model client; its retry settings apply.
        model: The model's name at the endpoint.
        messages: The prompt.
        sampling_args: Arguments of the completion call. None values are left out; ``max_tokens`` is sent as
            ``max_completion_tokens``; what is no OpenAI parameter goes into ``extra_body``.
        tools: Tools in OpenAI's form.

    Raises:
        OverlongPromptError: Prompt and requested tokens exceed the context length.
        EmptyModelResponseError: Neither text nor tool calls nor reasoning.
        InvalidModelResponseError: Not a chat completion with one choice.
        ModelUnreachableError: Every try found no connection, or one that broke.
        ModelTimeoutError: All tries together took longer than the client's timeout.
        ModelRateLimitError: The last try got a 429.
        ModelServerError: The last try got a 5xx, 408 or 409.
        ModelError: The endpoint refused the request; ModelKeyError if there is no key to use.
    """
    if client is None:
        raise ModelError("this environment calls a model, but the call names no client")
    import openai

    create = client.chat.completions.with_raw_response.create
    arguments = _arguments(sampling_args or {}, known=inspect.signature(create).parameters)
    if tools:
        arguments["tools"] = tools
    if arguments.get("stream"):
        raise ModelError("stream: answers are read whole here; leave it out of the sampling arguments")
    with counted_tries() as tries:
        try:
            raw = await create(model=model, messages=cast(Any, messages), **arguments)
        except openai.OpenAIError as error:
            raise _mapped(error, tries, str(client.base_url)) from error
    return read_completion(raw.content)


def read_completion(body: bytes) -> ChatResult:
    """The parts of a chat completion's JSON body.

    Raises:
        InvalidModelResponseError: It is not a chat completion with one choice, or an empty one.
    """
    try:
        response = _without_nulls(json.loads(body))
        return _result(response)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidModelResponseError(f"the endpoint's answer is not a chat completion: {excerpt(body)}") from error


def _result(response: dict[str, Any]) -> ChatResult:
    choices = response["choices"]
    if len(choices) != 1:
        raise InvalidModelResponseError(f"the endpoint returned {len(choices)} choices; one is expected (n = 1)")
    choice = choices[0]
    message = _message(choice["message"])
    if not (message["content"] or message.get("tool_calls") or message.get("reasoning_content")):
        raise EmptyModelResponseError(
            f"the model answered with neither text nor tool calls (finish_reason {choice.get('finish_reason')!r})"
        )
    finish_reason = choice.get("finish_reason")
    return ChatResult(
        message=message,
        finish_reason=finish_reason,
        usage=_usage(response.get("usage")),
        response=response,
        tokens=_tokens(response, choice, is_truncated=finish_reason == "length"),
    )


def _arguments(sampling_args: SamplingArgs, *, known: Container[str]) -> dict[str, Any]:
    given = {name: value for name, value in sampling_args.items() if value is not None}
    arguments = {name: value for name, value in given.items() if name in known}
    further = {name: value for name, value in given.items() if name not in known}
    if further:
        arguments["extra_body"] = {**further, **arguments.get("extra_body", {})}
    max_tokens = arguments.pop("max_tokens", None)
    if max_tokens is not None:
        arguments.setdefault("max_completion_tokens", max_tokens)
    return arguments


def _message(message: dict[str, Any]) -> Message:
    # Keys that some endpoints send (refusal, audio, function_call, index) make others refuse the next request.
    content = message.get("content", "")
    if not isinstance(content, str | list):
        raise TypeError(f"content is a {type(content).__name__}")
    kept: Message = {"role": "assistant", "content": content}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        kept["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_tool_call(call) for call in calls]
    return kept


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": str(call["id"]), "type": "function", "function": {"name": str(function["name"]), "arguments": text}}


def _usage(usage: dict[str, Any] | None) -> TokenUsage | None:
    if not usage or "prompt_tokens" not in usage:
        return None
    return {"input_tokens": int(usage["prompt_tokens"]), "output_tokens": int(usage.get("completion_tokens", 0))}


def _tokens(response: dict[str, Any], choice: dict[str, Any], *, is_truncated: bool) -> StepTokens | None:
    prompt_ids = response.get("prompt_token_ids", choice.get("prompt_token_ids"))
    completion_ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("content")
    if prompt_ids is None or completion_ids is None or logprobs is None:
        return None
    if len(logprobs) != len(completion_ids):
        raise ValueError(f"{len(logprobs)} logprobs for {len(completion_ids)} token ids")
    return {
        "prompt_ids": list(prompt_ids),
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": list(completion_ids),
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": [float(token["logprob"]) for token in logprobs],
        "is_truncated": is_truncated,
    }


def _mapped(error: Exception, tries: Tries, base_url: str) -> RolloutError:
    import openai

    where = tries.base_url or base_url
    if isinstance(error, openai.APIStatusError):
        return _refused(error, f"{where} answered {error.status_code} after {_tries(error, tries)}")
    if isinstance(error.__cause__, RolloutError):  # older versions of the library wrap what is not theirs
        return error.__cause__
    if isinstance(error, openai.APITimeoutError):
        return ModelTimeoutError(f"{where} did not answer in time after {_tries(error, tries)}{tries.last_words}")
    if isinstance(error, openai.APIConnectionError):
        return ModelUnreachableError(f"{where} could not be reached after {_tries(error, tries)}{tries.last_words}")
    return ModelError(f"the call to {where} failed: {excerpt(repr(ErrorChain(error)))}")


def _refused(error: openai.APIStatusError, told: str) -> RolloutError:
    text, status = error.response.text, error.status_code
    if status in (400, 413, 422) and any(phrase in text.lower() for phrase in OVERLONG_PHRASES):
        return OverlongPromptError(excerpt(text))
    if status == 429:
        wait = error.response.headers.get("retry-after")
        asked = f", which asks to wait {wait[:40]}" if wait else ""
        return ModelRateLimitError(f"{told}{asked}: {excerpt(text)}")
    if status in (408, 409) or status >= 500:
        return ModelServerError(f"{told}: {excerpt(text)}")
    return ModelError(f"{told}: {excerpt(text)}")


def _tries(error: Any, tries: Tries) -> str:
    """Of clients that are not ours only the library's header is known."""
    if tries.count:
        return str(tries)
    retries = int(error.request.headers.get("x-stainless-retry-count", 0))
    return f"{retries + 1} tries" if retries else "1 try"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
