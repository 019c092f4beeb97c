"""Several endpoints of one model: turns, leaving out those that are down, and their return."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import pytest
from bad_endpoint import BadEndpoint, MakeEndpoint, answer, error, hang

from envbus.environments import ModelClients
from envbus.environments.circuits import Circuits
from envbus.environments.model_call import ChatResult, chat
from envbus.errors import ModelError, ModelRateLimitError, ModelTimeoutError, ModelUnreachableError
from envbus.types import ClientConfig

PROMPT = [{"role": "user", "content": "hi"}]
PAUSE_S = 0.5


@pytest.fixture
def endpoints(make_endpoint: MakeEndpoint) -> list[BadEndpoint]:
    return [make_endpoint() for _ in range(3)]


@pytest.fixture
async def clients() -> Any:
    own = ModelClients(circuits=Circuits(pause_s=PAUSE_S))
    yield own
    await own.close()


@pytest.fixture
async def slow_to_probe() -> Any:
    own = ModelClients(circuits=Circuits(pause_s=600))
    yield own
    await own.close()


def together(endpoints: list[BadEndpoint], **settings: Any) -> ClientConfig:
    return ClientConfig(endpoint_configs=tuple(each.endpoint(**settings) for each in endpoints))


async def ask(clients: ModelClients, config: ClientConfig) -> ChatResult:
    """What a rollout of one turn does."""
    return await chat(clients.get(config), "m", PROMPT)


def counts(endpoints: list[BadEndpoint]) -> list[int]:
    return [len(endpoint.requests) for endpoint in endpoints]


async def test_they_take_turns_and_a_rollout_stays(clients: ModelClients, endpoints: list[BadEndpoint]) -> None:
    config = together(endpoints)
    for _ in range(2):
        client = clients.get(config)
        await chat(client, "m", PROMPT)
        await chat(client, "m", PROMPT)
    assert counts(endpoints) == [2, 2, 0]


async def test_one_of_them_may_be_wanted(clients: ModelClients, endpoints: list[BadEndpoint]) -> None:
    """keep_order: the others are for when it is down."""
    config = together(endpoints, max_retries=0).model_copy(update={"keep_order": True})
    for _ in range(3):
        await ask(clients, config)
    assert counts(endpoints) == [3, 0, 0]
    endpoints[0].close()
    for _ in range(3):
        await ask(clients, config)
    assert counts(endpoints) == [3, 3, 0]


async def test_nothing_is_lost_when_one_dies(
    clients: ModelClients, endpoints: list[BadEndpoint], caplog: pytest.LogCaptureFixture
) -> None:
    """Also not the rollouts that were under way there; then it is left out, and noticed when it is back."""
    caplog.set_level(logging.INFO, "envbus.environments.model_client")
    config = together(endpoints)
    dead, *alive = endpoints
    under_way = clients.get(config)
    await chat(under_way, "m", PROMPT)
    dead.close()
    dead.requests.clear()

    await chat(under_way, "m", PROMPT)
    assert f"the model endpoint {dead.url} fails" in caplog.text
    before = Counter(counts(alive))
    await asyncio.gather(*(ask(clients, config) for _ in range(6)))
    assert Counter(counts(alive)) - before, "all six went to the others"

    dead.open()
    async with asyncio.timeout(20):
        while not dead.requests:
            await ask(clients, config)
    assert f"the model endpoint {dead.url} answers again" in caplog.text
    assert caplog.text.count(f"{dead.url} fails: ") == 1, "logged once"
    dead.requests.clear()
    for _ in range(3):
        await ask(clients, config)
    assert len(dead.requests) == 1, "it has its turn again"


async def test_a_dead_one_gets_one_probe_in_a_pause(clients: ModelClients, endpoints: list[BadEndpoint]) -> None:
    config = together(endpoints, max_retries=0)
    dead = endpoints[0].will(error(500))
    while len(dead.requests) < 3:
        await ask(clients, config)
    while len(dead.requests) < 6:
        await asyncio.gather(*(ask(clients, config) for _ in range(10)))
    first, *_, last = dead.times_s[2:]
    assert last - first >= 3 * PAUSE_S * 0.9, "three probes, a pause before each"


async def test_one_that_hangs_is_left_out(slow_to_probe: ModelClients, endpoints: list[BadEndpoint]) -> None:
    """Its calls end by their timeout, the next ones go elsewhere; a cancel by the caller proves nothing."""
    hanging, *others = endpoints
    hanging.will(hang)
    ring = (hanging.endpoint(timeout=0.5), *(each.endpoint() for each in others))
    impatient, patient = ClientConfig(endpoint_configs=ring), together(endpoints)
    for _ in range(4):
        call = asyncio.create_task(ask(slow_to_probe, patient))
        assert await asyncio.to_thread(hanging.asked.acquire, timeout=10), "it keeps its turn"
        call.cancel()
        await asyncio.wait({call})
        for _ in range(2):
            await ask(slow_to_probe, patient)
    assert len(hanging.requests) == 4

    ends = [await settled(ask(slow_to_probe, impatient)) for _ in range(12)]
    assert [type(end) for end in ends if isinstance(end, ModelError)] == [ModelTimeoutError] * 3
    assert len(hanging.requests) == 7


async def settled(call: Any) -> Any:
    try:
        return await call
    except ModelError as error:
        return error


async def test_a_busy_one_hands_over_but_is_not_left_out(clients: ModelClients, endpoints: list[BadEndpoint]) -> None:
    """429 is an answer: the call goes on elsewhere, the endpoint keeps its turns."""
    busy = endpoints[0].will(error(429, Retry_After_Ms="1"))
    config = together(endpoints)
    for _ in range(6):
        await ask(clients, config)
    assert len(busy.requests) == 2 * 3, "two turns of three tries"
    for endpoint in endpoints:
        endpoint.will(error(429, "all of them", Retry_After_Ms="1"))
    with pytest.raises(ModelRateLimitError, match=r"after 9 tries.*all of them"):
        await ask(clients, together(endpoints, max_retries=2))


async def test_a_refused_request_is_not_sent_elsewhere(clients: ModelClients, endpoints: list[BadEndpoint]) -> None:
    endpoints[0].will(error(400, "bad prompt"))
    with pytest.raises(ModelError, match="bad prompt"):
        await ask(clients, together(endpoints))
    assert counts(endpoints) == [1, 0, 0]


async def test_with_all_dead_a_call_ends_after_its_tries(
    slow_to_probe: ModelClients, endpoints: list[BadEndpoint]
) -> None:
    """A typed error, never a tight loop: each call makes the tries of one endpoint, with their waits."""
    config = together(endpoints, max_retries=1)
    for endpoint in endpoints:
        endpoint.close()
    with pytest.raises(ModelUnreachableError, match="after 6 tries"):
        await ask(slow_to_probe, config)
    with pytest.raises(ModelUnreachableError, match="after 6 tries"):
        await ask(slow_to_probe, config)
    started = time.monotonic()
    with pytest.raises(ModelUnreachableError, match="after 2 tries"):
        await ask(slow_to_probe, config)
    assert time.monotonic() - started >= 0.35, "the backoff"
    endpoints[1].open()
    async with asyncio.timeout(20):
        while isinstance(await settled(ask(slow_to_probe, config)), ModelError):
            pass


async def test_each_gets_its_own_key(
    clients: ModelClients, endpoints: list[BadEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P53: a call that goes on elsewhere takes that endpoint's key, not the first one's."""
    monkeypatch.setenv("KEY_A", "secret-a")
    monkeypatch.setenv("KEY_B", "secret-b")
    first, second, _ = endpoints
    first.will(error(500))
    second.will(answer())
    ring = (first.endpoint(api_key_var="KEY_A", max_retries=0), second.endpoint(api_key_var="KEY_B"))
    await ask(clients, ClientConfig(endpoint_configs=ring))
    assert [each.requests[0].headers["Authorization"] for each in (first, second)] == [
        "Bearer secret-a",
        "Bearer secret-b",
    ]
