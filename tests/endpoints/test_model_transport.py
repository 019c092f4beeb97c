"""How model requests leave a process: which addresses, which proxies, and what comes back of an answer."""

from __future__ import annotations

import asyncio
import gzip
import html
import json
import logging
import os
import secrets as random
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from bad_endpoint import BadEndpoint, MakeEndpoint, answer, completion, error, raw
from hypothesis import given, settings
from hypothesis import strategies as st

from envbus.environments import ModelClients, model_proxies
from envbus.environments.answer_bytes import MASK, Secrets, unpacked
from envbus.environments.model_call import chat
from envbus.errors import ModelAddressError, ModelError, ModelUnreachableError
from envbus.types import EndpointConfig

PROMPT = [{"role": "user", "content": "hi"}]
PASSWORD = "password-of-the-proxy"
KEY = "sk-canary/4f+9b1c-DO-NOT-LEAK"


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a name lead to addresses, the last one from then on."""
    real, known = socket.getaddrinfo, dict[str, list[str]]()

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **settings: Any) -> Any:
        if host not in known:
            return real(host, port, *arguments, **settings)
        return [found for each in known[host] for found in real(each, port, *arguments, **settings)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return lambda host, *addresses: known.update({host: list(addresses)})


@pytest.fixture
async def passing_over() -> AsyncIterator[ModelClients]:
    """Clients as a server has them, without --model-proxy."""
    clients = ModelClients(uses_proxies=False)
    yield clients
    await clients.close()


async def test_a_metadata_service_hears_nothing() -> None:
    """By its address, by a name, and by a name that led elsewhere at first (DNS rebinding)."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("this needs root and unshare(1)")
    script = Path(__file__).with_name("metadata_host.py")
    command = ["unshare", "--net", sys.executable, str(script)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in done.stderr:
        pytest.skip("network namespaces are not allowed here")
    assert done.stdout == "nobody called\n", done.stderr


async def test_of_several_addresses_one_that_nobody_may_call_stops_the_call(
    endpoint: BadEndpoint, clients: ModelClients, resolves: Callable[..., None]
) -> None:
    url = f"http://model.example:{endpoint.port}/v1"
    for addresses in (["127.0.0.1", "169.254.1.1"], ["fe80::1%1", "127.0.0.1"]):
        resolves("model.example", *addresses)
        with pytest.raises(ModelAddressError, match=r"model\.example leads to a link-local"):
            await chat(clients.get(endpoint.endpoint(api_base_url=url)), "m", PROMPT)
    assert endpoint.requests == []
    resolves("model.example", "127.0.0.2", "127.0.0.1")  # nobody listens at the first
    await chat(clients.get(endpoint.endpoint(api_base_url=url)), "m", PROMPT)
    assert endpoint.requests[0].headers["Host"] == f"model.example:{endpoint.port}"


async def test_a_name_that_does_not_resolve_is_unreachable(clients: ModelClients) -> None:
    config = EndpointConfig(api_base_url="http://model.invalid/v1", api_key_var=None, max_retries=0)
    with pytest.raises(ModelUnreachableError, match="could not be reached after 1 try"):
        await chat(clients.get(config), "m", PROMPT)


async def test_proxies_of_the_environment(
    make_endpoint: MakeEndpoint,
    clients: ModelClients,
    passing_over: ModelClients,
    resolves: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server passes them over, a program uses them; each says so once. NO_PROXY and loopback are direct."""
    model, proxy = make_endpoint(), make_endpoint()
    resolves("model.example", "127.0.0.1")
    monkeypatch.setattr(model_proxies, "_told", set())
    monkeypatch.setenv("HTTP_PROXY", f"http://user:{PASSWORD}@127.0.0.1:{proxy.port}")
    named = model.endpoint(api_base_url=f"http://model.example:{model.port}/v1")
    with caplog.at_level(logging.WARNING, logger="envbus"):
        for _ in range(2):
            await chat(passing_over.get(named), "m", PROMPT)
        assert (len(model.requests), len(proxy.requests)) == (2, 0)
        for _ in range(2):
            await chat(clients.get(named), "m", PROMPT)
        assert (len(model.requests), len(proxy.requests)) == (2, 2)
        assert proxy.requests[0].headers["Host"] == f"model.example:{model.port}"
        await chat(clients.get(model.endpoint()), "m", PROMPT)
        monkeypatch.setenv("NO_PROXY", "other.example,.example")
        await chat(clients.get(named), "m", PROMPT)
        assert (len(model.requests), len(proxy.requests)) == (4, 2)
    told = [record.getMessage() for record in caplog.records]
    place = f"http://127.0.0.1:{proxy.port}"
    assert [place in line for line in told] == [True, True], told
    assert ["--model-proxy" in line for line in told] == [True, False]
    assert PASSWORD not in str(told)


async def test_a_proxy_that_is_none_is_told_without_its_password(
    clients: ModelClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", f"ftp://user:{PASSWORD}@proxy.example")
    config = EndpointConfig(api_base_url="http://model.example/v1", api_key_var=None)
    with pytest.raises(ModelAddressError, match="proxy is of no use") as refused:
        await chat(clients.get(config), "m", PROMPT)
    assert PASSWORD not in repr(refused.value.__cause__) + str(refused.value)


async def test_a_client_calls_its_own_origin_alone(make_endpoint: MakeEndpoint, clients: ModelClients) -> None:
    """Also where an environment gives it another URL, or a redirect is asked for."""
    one, other = make_endpoint(), make_endpoint()
    client = clients.get(one.endpoint())
    with pytest.raises(ModelAddressError, match=f"calls http://127.0.0.1:{one.port} alone"):
        await chat(client.with_options(base_url=other.url), "m", PROMPT)
    with pytest.raises(ModelAddressError):
        await client.post(f"{other.url}/chat/completions", cast_to=dict[str, Any])
    one.will(answer(b"", status=307, Location=f"{other.url}/chat/completions"))
    with pytest.raises(Exception, match="307"):
        await client.post("/chat/completions", cast_to=dict[str, Any], options={"follow_redirects": True})
    assert other.requests == []


async def test_no_cookie_comes_back(endpoint: BadEndpoint, clients: ModelClients) -> None:
    """Callers of one endpoint share a client: what it sets for one would be sent for all."""
    endpoint.will(answer(Set_Cookie="session=1"))
    for _ in range(2):
        await chat(clients.get(endpoint.endpoint()), "m", PROMPT)
    assert "Cookie" not in endpoint.requests[-1].headers


async def test_ids_go_with_the_key_that_they_belong_to(
    endpoint: BadEndpoint, clients: ModelClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OTHER_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    for variable in (None, "OTHER_KEY", "OPENAI_API_KEY"):
        headers = {"OpenAI-Project": "named"}
        config = endpoint.endpoint(api_key_var=variable, extra_headers=headers)
        await chat(clients.get(config), "m", PROMPT)
    sent = [(each.headers.get("OpenAI-Organization"), each.headers["OpenAI-Project"]) for each in endpoint.requests]
    assert sent == [(None, "named"), (None, "named"), ("org-1", "named")]


async def test_a_streamed_answer_is_without_the_key(
    endpoint: BadEndpoint, clients: ModelClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it crosses from one piece to the next, and where the stream is packed."""
    monkeypatch.setenv("MY_LLM_KEY", KEY)
    chunk = f'data: {{"choices": [{{"index": 0, "delta": {{"content": "{KEY}!"}}}}]}}\n\ndata: [DONE]\n\n'.encode()
    client = clients.get(endpoint.endpoint(api_key_var="MY_LLM_KEY"))
    for act in (
        answer(chunk, content_type="text/event-stream"),
        answer(gzip.compress(chunk), content_type="text/event-stream", Content_Encoding="gzip"),
    ):
        endpoint.will(act)
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        assert [each.choices[0].delta.content async for each in stream] == [f"{MASK.decode()}!"]


async def test_a_key_that_cannot_be_sent_is_in_no_error(clients: ModelClients, endpoint: BadEndpoint) -> None:
    """A library that quotes a header that it cannot send."""
    client = clients.get(endpoint.endpoint()).with_options(default_headers={"X-Api-Key": f"{KEY}\n"})
    with pytest.raises(ModelError, match=r"failed \(LocalProtocolError\)") as refused:
        await chat(client, "m", PROMPT)
    chain = [refused.value, refused.value.__cause__, refused.value.__context__]
    assert KEY not in "".join(map(repr, chain))


async def test_a_key_in_an_answer_reaches_neither_errors_nor_outputs(
    endpoint: BadEndpoint, clients: ModelClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_LLM_KEY", KEY)
    client = clients.get(endpoint.endpoint(api_key_var="MY_LLM_KEY", max_retries=0))
    endpoint.will(error(401, f"Incorrect API key provided: {KEY}"))
    with pytest.raises(ModelError, match=r"Incorrect API key provided: \[redacted\]"):
        await chat(client, "m", PROMPT)
    endpoint.will(answer(completion(f"you said {KEY}"), X_Echo=f"Bearer {KEY}"))
    whole = await client.chat.completions.with_raw_response.create(model="m", messages=[])
    assert KEY not in str(whole.headers) + whole.text
    assert (await chat(client, "m", PROMPT)).message["content"] == "you said [redacted]"


HEAD = b"HTTP/1.1 401 No\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"Incorrect key KEY\r\n\r\n",
        b"HTTP/1.1 401 No\r\nKEY\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nIncorrect key KEY\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nKEY\r\n\r\n",
        HEAD + b"X-Echo: KEY\r\nContent-Length: 2\r\n\r\nno",
    ],
)
async def test_what_the_library_says_of_an_answer_quotes_no_key(
    endpoint: BadEndpoint,
    clients: ModelClients,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    data: bytes,
) -> None:
    """Its errors quote what it cannot read, and its debug log the heads of answers."""
    monkeypatch.setenv("MY_LLM_KEY", KEY)
    client = clients.get(endpoint.endpoint(api_key_var="MY_LLM_KEY", max_retries=0))
    endpoint.will(raw(data.replace(b"KEY", KEY.encode())))
    with caplog.at_level(logging.DEBUG), pytest.raises(ModelError) as refused:
        await chat(client, "m", PROMPT)
    assert "send_request_headers" in caplog.text, "the library's log is on"
    assert KEY not in caplog.text
    assert KEY not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout": float("nan")},
        {"timeout": 0},
        {"timeout": "1"},
        {"timeout": {"read": 1}},
        {"stream": True},
        {"extra_headers": {b"Host": "x"}},
        {"extra_headers": {"X-A": b"a\r\nHost: x"}},
    ],
)
async def test_sampling_arguments_that_no_call_may_have(
    endpoint: BadEndpoint, clients: ModelClients, arguments: dict[str, Any]
) -> None:
    """Told as what they are, and nobody is called."""
    with pytest.raises(ModelError, match=next(iter(arguments))):
        await chat(clients.get(endpoint.endpoint()), "m", PROMPT, arguments)
    assert endpoint.requests == []


@pytest.mark.parametrize("echo", [json.dumps, html.escape, quote, lambda key: key.replace("&", "\\u0026")])
def test_a_key_is_found_in_the_spellings_of_answers(echo: Callable[[str], str]) -> None:
    key = "sk-a&b/c+d=e"
    told = Secrets([key]).masked(f"no: {echo(key)}!".encode())
    assert told.replace(b'"', b"") == b"no: [redacted]!"


@settings(max_examples=40)
@given(st.data())
def test_secrets_are_taken_out_wherever_pieces_begin_and_end(data: st.DataObject) -> None:
    secret = data.draw(st.text("ab/", min_size=8, max_size=10))
    parts = data.draw(st.lists(st.sampled_from([secret, "a", "b", "/", "x", secret[:5]]), max_size=8))
    body = "".join(parts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    pieces = [body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]

    async def all_of() -> bytes:
        return b"".join([piece async for piece in Secrets([secret]).taken_out(each(pieces))])

    taken = asyncio.run(all_of())
    assert secret.encode() not in taken
    if secret.encode() not in body:
        assert taken == body


@settings(max_examples=30)
@given(st.binary(max_size=2_000), st.integers(1, 50))
def test_packed_bytes_come_out_whole(body: bytes, size: int) -> None:
    packed = gzip.compress(body)
    pieces = [packed[at : at + size] for at in range(0, len(packed), size)]

    async def all_of() -> bytes:
        return b"".join([piece async for piece in unpacked(each(pieces), "gzip")])

    assert asyncio.run(all_of()) == body


def test_short_values_are_no_secrets() -> None:
    assert not Secrets(["no-key", "EMPTY", ""])
    assert Secrets([random.token_hex(4)])


async def each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
