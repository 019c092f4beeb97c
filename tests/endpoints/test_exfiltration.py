"""P47: whatever a client of a fleet tries, a key goes to its origin alone, and nobody else is called or told."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import nats
import pytest
from bad_endpoint import BadEndpoint, answer, completion
from listening import Listener
from served import ITEM, READY_S, client_of, serving

from envbus.bus.embedded import EmbeddedNats

CANARY = "sk-canary/4f+9b1c-DO-NOT-LEAK"
OTHER = "sk-other-3c77a2-DO-NOT-LEAK"
HEADERS = [
    "Authorization",
    "aUTHORIZATION",
    "Proxy-Authorization",
    "Cookie",
    "Host",
    "X-Api-Key",
    "api-key",
    "Content-Length",
    "Expect",
    "Transfer-Encoding",
    "Connection",
    "X-Forwarded-Host",
    "Forwarded",
    "Upgrade",
    "Metadata-Flavor",
    "X:Y",
    "Hôst",
]
HEADERS += ["X\r\nAuthorization", "X Y", "", "X\0"]
RIGHT = answer(completion("<reversed_text>cba</reversed_text>"))


@dataclass
class Fleet:
    """A server that may use one key at one origin, one origin without a key, and whoever listens in the wrong place."""

    prefix: str
    pid: int
    log_file: Path
    good: BadEndpoint
    keyless: BadEndpoint
    foreign: Listener
    connection: Any = None
    seen: list[bytes] = field(default_factory=list)
    """Every message of the bus."""

    async def ask(self, client: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """A plain request, made by a program that checks nothing."""
        packed = msgpack.packb({"input": ITEM, "client": client, "model": "m", **fields})
        async with asyncio.timeout(60):
            while True:
                message = await self.connection.request(f"{self.prefix}.reverse-text.rollout", packed, timeout=60)
                if (message.headers or {}).get("Nats-Service-Error-Code") != "503":  # a slot that is not free yet
                    break
        reply: dict[str, Any] = msgpack.unpackb(message.data)
        return reply

    async def refusal(self, client: dict[str, Any], **fields: Any) -> tuple[str, str]:
        """Kind and text of a request's refusal; nobody was called."""
        called = len(self.good.requests), len(self.keyless.requests)
        reply = await self.ask(client, **fields)
        assert (len(self.good.requests), len(self.keyless.requests)) == called, client
        if not reply["ok"]:
            return reply["error"]["code"], reply["error"]["message"]
        error = reply["output"]["error"]
        assert error is not None, client
        return error["error"], error["error_chain_repr"]

    @property
    def elsewhere(self) -> str:
        return f"http://127.0.0.1:{self.foreign.port}/v1"


@pytest.fixture(scope="module")
def started(session_nats: EmbeddedNats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    prefix, folder = f"t{secrets.token_hex(4)}", tmp_path_factory.mktemp("fleet")
    good, keyless = BadEndpoint(), BadEndpoint()
    good.open()
    keyless.open()
    options = ["--allow-key", f"CANARY_KEY=http://127.0.0.1:{good.port}", "--log-level", "DEBUG"]
    options += ["--allow-url", f"http://127.0.0.1:{keyless.port}"]
    environ = {"CANARY_KEY": CANARY, "OTHER_KEY": OTHER, "OPENAI_API_KEY": OTHER, "OPENAI_ORG_ID": "org-canary"}
    environ |= {"OPENAI_CUSTOM_HEADERS": f"X-Secret: {OTHER}", "OPENAI_PROJECT_ID": "proj-canary"}
    try:
        with Listener().listening() as foreign:
            environ |= dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), f"http://127.0.0.1:{foreign.port}")
            with serving(session_nats.url, prefix, folder, options=options, environ=environ) as process:
                yield Fleet(prefix, process.pid, folder / f"{prefix}.log", good, keyless, foreign)
    finally:
        good.close()
        keyless.close()


@pytest.fixture
async def fleet(started: Fleet, session_nats: EmbeddedNats) -> AsyncIterator[Fleet]:
    """The fleet with a connection that reads all that is said on the bus; it holds no key at the end of any test."""

    async def see(message: Any) -> None:
        started.seen.append(message.subject.encode() + repr(message.headers).encode() + message.data)

    async with client_of(session_nats.url, started.prefix) as client:
        await client.wait_for_server(timeout_s=READY_S)
    started.connection = await nats.connect(session_nats.url)
    started.good.will(RIGHT)
    started.keyless.will(RIGHT)
    try:
        with pytest.raises(nats.errors.NoRespondersError):  # its first request starts a task that stays
            await started.connection.request(f"{started.prefix}.nobody", b"")
        await started.connection.subscribe(">", cb=see)
        yield started
        await started.connection.flush()
    finally:
        await started.connection.close()
    assert started.foreign.heard == []
    process = Path(f"/proc/{started.pid}")
    told = [started.log_file.read_bytes(), (process / "cmdline").read_bytes(), (process / "comm").read_bytes()]
    for place in (*told, *started.seen):
        for secret in (CANARY, OTHER, "org-canary", "proj-canary"):
            assert secret.encode() not in place
            assert secret.replace("/", "\\/").encode() not in place


def plain(text: str) -> str:
    """A refusal without what the client itself named."""
    return re.sub(r"[A-Z_]+_KEY|https?://[a-z0-9.:\[\]-]*[a-z0-9\]]", "…", text)


async def test_one_refusal_for_unset_unknown_and_mismatched(fleet: Fleet) -> None:
    """P47: it names variable, server and host; whether the variable is set, or allowed elsewhere, is not told."""
    allowed = fleet.good.url
    told = {
        await fleet.refusal({"api_base_url": url, "api_key_var": variable})
        for url, variable in (
            (allowed, "OTHER_KEY"),  # set, not allowed
            (allowed, "NO_SUCH_KEY"),
            (allowed, "PATH_KEY"),
            (fleet.elsewhere, "CANARY_KEY"),  # allowed, at another origin
            (fleet.elsewhere, "OTHER_KEY"),
            (fleet.elsewhere, "NO_SUCH_KEY"),
            (fleet.keyless.url, "CANARY_KEY"),
            (f"http://localhost:{fleet.good.port}/v1", "CANARY_KEY"),
            (f"https://127.0.0.1:{fleet.good.port}/v1", "CANARY_KEY"),
            (f"http://127.0.0.1.example:{fleet.good.port}/v1", "CANARY_KEY"),
            (f"http://[::1]:{fleet.good.port}/v1", "CANARY_KEY"),
            ("http://127.0.0.1/v1", "CANARY_KEY"),
        )
    }
    kinds = {kind for kind, _ in told}
    assert kinds == {"ModelKeyError"}
    assert len({plain(text) for _, text in told}) == 1, told
    text = next(text for _, text in told if "CANARY_KEY" in text and fleet.elsewhere.removesuffix("/v1") in text)
    assert socket.gethostname() in text
    assert f"--allow-key CANARY_KEY={fleet.elsewhere.removesuffix('/v1')}" in text


async def test_no_url_is_called_that_is_not_allowed(fleet: Fleet) -> None:
    """Without a key, too: one refusal, whether somebody listens there or not."""
    told = {
        await fleet.refusal({"api_base_url": url, "api_key_var": None})
        for url in (fleet.elsewhere, "http://127.0.0.1:1/v1", "http://10.255.255.1/v1", "https://models.example/v1")
    }
    assert {kind for kind, _ in told} == {"ModelAddressError"}
    assert len({plain(text) for _, text in told}) == 1, told
    assert any("--allow-url https://models.example" in text for _, text in told)


@pytest.mark.parametrize(
    "form",
    [
        "http://127.0.0.1:{good}@127.0.0.1:{foreign}/v1",
        "http://user:{canary}@127.0.0.1:{good}/v1",
        "http://127.0.0.1:{good}\\@127.0.0.1:{foreign}/v1",
        "http:\\\\127.0.0.1:{foreign}/v1",
        "http:/127.0.0.1:{foreign}/v1",
        "http://2130706433:{foreign}/v1",
        "http://0x7f000001:{foreign}/v1",
        "http://0177.0.0.1:{foreign}/v1",
        "http://127.1:{foreign}/v1",
        "http://127.0.0.1.:{foreign}/v1",
        "http://127.0.0.1%2e:{foreign}/v1",
        "http://\uff11\uff12\uff17.0.0.1:{foreign}/v1",
        "http://loc\u00adalhost:{foreign}/v1",
        "http://127.0.0.1:{good}#@127.0.0.1:{foreign}/v1",
        "http://127.0.0.1:{good}?@127.0.0.1:{foreign}/v1",
        "http://127.0.0.1:{good} @127.0.0.1:{foreign}/v1",
        "http://127.0.0.1\r\nHost: x:{foreign}/v1",
        "http://[::ffff:127.0.0.1%25lo]:{foreign}/v1",
        "HTTP://127.0.0.1:\t{foreign}/v1",
        "file:///proc/self/environ",
        "unix:///run/docker.sock",
        "//127.0.0.1:{foreign}/v1",
        "",
    ],
)
async def test_odd_spellings_of_a_url_are_refused_before_anything_starts(fleet: Fleet, form: str) -> None:
    """No two readings of a URL: it is refused as it is written, and not repeated."""
    url = form.format(good=fleet.good.port, foreign=fleet.foreign.port, canary="pass-word-of-a-client")
    kind, text = await fleet.refusal({"api_base_url": url, "api_key_var": "CANARY_KEY"})
    assert kind == "bad_request"
    assert "must be an http or https URL like http://localhost:8000/v1" in text
    assert "pass-word" not in text


async def test_metadata_and_link_local_addresses_are_never_called(fleet: Fleet) -> None:
    for host in ("169.254.169.254", "[fe80::1]", "[fd00:ec2::254]", "100.100.100.200", "[::ffff:169.254.169.254]"):
        for variable in (None, "CANARY_KEY"):
            kind, text = await fleet.refusal({"api_base_url": f"http://{host}/v1", "api_key_var": variable})
            assert (kind, "link-local or metadata" in text) == ("ModelAddressError", True)


@pytest.mark.parametrize("name", HEADERS)
async def test_headers_that_a_call_may_not_add(fleet: Fleet, name: str) -> None:
    """In the client's config, in one of several endpoints, and in the sampling arguments."""
    good: dict[str, Any] = {"api_base_url": fleet.good.url, "api_key_var": "CANARY_KEY"}
    value = "value-of-a-client"
    bad = {**good, "extra_headers": {name: value}}
    for client in (bad, {"endpoint_configs": [good, bad]}):
        kind, text = await fleet.refusal(client)
        assert (kind, value in text) == ("bad_request", False)
        assert "extra_headers" in text
    kind, text = await fleet.refusal(good, sampling_args={"extra_headers": {name: value}})
    assert (kind, value in text) == ("ModelError", False)


async def test_values_of_headers_do_not_split_a_request(fleet: Fleet) -> None:
    for value in ("a\r\nHost: x", "a\nb", "a\0b", "ä"):
        client = {"api_base_url": fleet.good.url, "api_key_var": "CANARY_KEY", "extra_headers": {"X-A": value}}
        assert (await fleet.refusal(client))[0] == "bad_request"


async def test_several_endpoints_are_checked_one_by_one_before_any_is_called(fleet: Fleet) -> None:
    good = {"api_base_url": fleet.good.url, "api_key_var": "CANARY_KEY"}
    for bad, kind in (
        ({**good, "api_base_url": fleet.elsewhere}, "ModelKeyError"),
        ({**good, "api_key_var": "OTHER_KEY"}, "ModelKeyError"),
        ({**good, "api_key_var": None, "api_base_url": fleet.elsewhere}, "ModelAddressError"),
    ):
        for ring in ([good, bad], [bad, good], [good, good, bad]):
            assert (await fleet.refusal({"endpoint_configs": ring, "keep_order": True}))[0] == kind


async def test_redirects_and_proxies_lead_nowhere(fleet: Fleet) -> None:
    """Not followed, and not used: the server's environment names a proxy."""
    client = {"api_base_url": fleet.good.url, "api_key_var": "CANARY_KEY"}
    for status in (301, 302, 303, 307, 308):
        fleet.good.will(answer(b"", status=status, Location=fleet.elsewhere))
        reply = await fleet.ask(client)
        assert reply["output"]["error"]["error"] == "ModelError"
        assert f"answered {status}" in reply["output"]["error"]["error_chain_repr"]


async def test_what_is_allowed_works_and_no_more_than_the_key_is_sent(fleet: Fleet) -> None:
    client = {"api_base_url": fleet.good.url, "api_key_var": "CANARY_KEY", "extra_headers": {"X-Session": "1"}}
    for config in (client, {"endpoint_configs": [client, client]}, {**client, "api_key_var": None}):
        assert (await fleet.ask(config))["output"]["reward"] == 1.0
    assert (await fleet.ask({"api_base_url": fleet.keyless.url, "api_key_var": None}))["output"]["reward"] == 1.0
    *keyed, bare = fleet.good.requests[-3:]
    for request in keyed:
        assert request.headers["Authorization"] == f"Bearer {CANARY}"
        assert request.headers["X-Session"] == "1"
    for request in (bare, fleet.keyless.requests[-1]):
        assert request.headers["Authorization"] == "Bearer no-key"
    for request in (*keyed, bare, fleet.keyless.requests[-1]):
        assert not {"OpenAI-Organization", "OpenAI-Project", "X-Secret"} & set(request.headers)
        assert OTHER not in str(request.headers)


async def test_an_endpoint_that_echoes_the_key_does_not_spread_it(fleet: Fleet) -> None:
    """In errors, answers and headers, packed and not, in JSON's spellings: it is taken out before anybody sees it."""
    client = {"api_base_url": fleet.good.url, "api_key_var": "CANARY_KEY", "max_retries": 1}
    told = f"Incorrect API key provided: {CANARY}. Bearer {CANARY}"
    slashed = f'{{"error": "{told}"}}'.replace("/", "\\/").encode()
    text = completion(f"<reversed_text>cba</reversed_text> {told}")
    packed = gzip.compress(f'{{"error": "{told}"}}'.encode())
    for act in (
        answer({"error": {"message": told}}, status=401),
        answer({"error": {"message": told}}, status=429, Retry_After=CANARY),
        answer({"error": {"message": told}}, status=500),
        answer(slashed, status=400),
        answer(packed, status=403, Content_Encoding="gzip"),
        answer(told.encode(), status=404, content_type="text/plain", X_Echo=CANARY),
        answer(told.encode(), content_type="text/html"),
        answer(text),
    ):
        fleet.good.will(act)
        output = (await fleet.ask(client, state_columns=["trajectory"]))["output"]
        assert "[redacted]" in str(output)
        assert CANARY not in str(output)


async def test_the_log_of_a_server_that_stops_holds_no_key(fleet: Fleet) -> None:
    """The last test of this server: the fixture reads its log when it has ended."""
    os.kill(fleet.pid, signal.SIGTERM)
    async with asyncio.timeout(30):
        while b"has stopped" not in fleet.log_file.read_bytes():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
