"""Retries of one endpoint: how many, how long apart, and what the error says of them."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from typing import Any

import pytest
from bad_endpoint import BadEndpoint, MakeEndpoint, answer, cut, error

from envbus.environments import resolve_client
from envbus.environments.model_call import ChatResult, chat
from envbus.errors import ModelRateLimitError, ModelServerError, ModelUnreachableError
from envbus.types import ClientConfig

PROMPT = [{"role": "user", "content": "hi"}]


async def ask(endpoint: BadEndpoint, **settings: Any) -> ChatResult:
    return await chat(resolve_client(endpoint.config(**settings)), "m", PROMPT)


def pauses_s(endpoint: BadEndpoint) -> list[float]:
    return [second - first for first, second in pairwise(endpoint.times_s)]


async def test_twice_500_then_fine(endpoint: BadEndpoint) -> None:
    """P51 (C): with the default number of retries."""
    endpoint.will(error(500), error(500), answer())
    assert (await ask(endpoint)).message["content"] == "hello"
    first, second = pauses_s(endpoint)
    assert first >= 0.35, "0.5 s, less up to a quarter"
    assert second >= 0.7, "twice that"


async def test_always_429(endpoint: BadEndpoint) -> None:
    """P51 (B): the number of tries, the time and the last body are told."""
    endpoint.will(error(429, "first", Retry_After="0.05"), error(429, "busy" + "y" * 5000, Retry_After="0.05"))
    with pytest.raises(ModelRateLimitError, match=r"answered 429 after 4 tries in \d+\.\d s.*busyyy") as caught:
        await ask(endpoint, max_retries=3)
    assert len(endpoint.requests) == 4
    assert len(str(caught.value)) < 1500
    assert all(pause >= 0.05 for pause in pauses_s(endpoint)), "no tight loop"


async def test_a_refused_connection(endpoint: BadEndpoint) -> None:
    """P51 (A)."""
    endpoint.close()
    with pytest.raises(ModelUnreachableError, match=rf"{endpoint.url} could not be reached after 2 tries in "):
        await ask(endpoint, max_retries=1)


async def test_the_last_answer_is_told_when_there_was_none_after_it(endpoint: BadEndpoint) -> None:
    """P51: a cut connection says nothing; the 503 before it does."""
    endpoint.will(error(503, "GPU on fire", Retry_After_Ms="1"), cut)
    with pytest.raises(ModelUnreachableError, match=r"after 2 tries .*the last answer was 503: .*GPU on fire"):
        await ask(endpoint, max_retries=1)


async def test_retry_after_is_kept(make_endpoint: MakeEndpoint) -> None:
    """P51: in both of its forms; not before that time, whatever the backoff would be."""
    ready_at = (datetime.now(UTC) + timedelta(seconds=2)).replace(microsecond=0)
    in_seconds = make_endpoint().will(error(503, Retry_After="1"), answer())
    at_a_date = make_endpoint().will(error(503, Retry_After=format_datetime(ready_at, usegmt=True)), answer())
    await asyncio.gather(*(ask(each, max_retries=1) for each in (in_seconds, at_a_date)))
    assert pauses_s(in_seconds)[0] >= 1.0
    assert datetime.now(UTC) >= ready_at


async def test_those_who_were_told_the_same_come_back_spread(
    endpoint: BadEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P51: over a quarter of the wait, so that a busy endpoint is not hit by everyone in the same moment."""
    monkeypatch.setattr("random.random", lambda: 1.0)
    endpoint.will(error(429, Retry_After="1"), answer())
    await ask(endpoint, max_retries=1)
    assert pauses_s(endpoint)[0] >= 1.25


async def test_a_retry_after_over_the_bound_ends_the_call(endpoint: BadEndpoint) -> None:
    """P51: no rollout waits for an hour because an endpoint says so."""
    endpoint.will(error(429, "out of quota", Retry_After="3600"))
    started = time.monotonic()
    with pytest.raises(ModelRateLimitError, match=r"after 1 try .*asks to wait 3600: .*out of quota"):
        await ask(endpoint)
    assert time.monotonic() - started < 30


async def test_a_senseless_retry_after_is_no_tight_loop(make_endpoint: MakeEndpoint) -> None:
    """P51: the usual backoff then, or the end of the call."""
    values = ["-5", "nan", "soon", "0", "Thu, 01 Jan 1970 00:00:00 GMT", "1e400"]
    endpoints = [make_endpoint().will(error(503, Retry_After=value)) for value in values]
    ends = await asyncio.gather(*(ask(each, max_retries=1) for each in endpoints), return_exceptions=True)
    assert {type(end) for end in ends} == {ModelServerError}
    assert all(pause >= 0.35 for endpoint in endpoints for pause in pauses_s(endpoint))


def test_settings_that_would_never_end_are_refused() -> None:
    for settings in ({"timeout": 0}, {"timeout": float("inf")}, {"max_retries": -1}, {"connect_timeout": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            ClientConfig(**settings)
