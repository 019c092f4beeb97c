"""Addresses of NATS: every source and form, what is refused, and that no secret is ever shown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import pickle
import re
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nats
import nats.errors
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import SecretStr, ValidationError
from tcp_server import tcp_server

from envbus.bus.address import BusOptions, find_bus_options, resolve_bus_options
from envbus.bus.connection import Connection
from envbus.bus.embedded import EmbeddedNats
from envbus.errors import BusUnreachableError, UsageError

SECRET = "s3cr3t-horse"
SEED = "SUACB3TTJA4LKHG25Z3Y444PQYIB5H27FFFFGMTHGZX7J5R4NUPL7SRDGA"
NKEY = "UACWOGJWYWMZ4FUCHIAZN5API2I6SG2QIPO5NVQCTNLFOYQR47NL4KCJ"
CREDS = f"""-----BEGIN NATS USER JWT-----
abc.def.ghi
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{SEED}
------END USER NKEY SEED------
"""
# Of localhost and 127.0.0.1, valid from 2020 to 2120, its own CA; used by nothing but these tests.
TLS_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgcxvpVyDMIH0txmCm
qe3NS9bqasEwV4sGUPXdDvl1tDWhRANCAATh/mignMB+c5qjayUp3LAgLSTMF73/
6xf9XjkZngbhW4/LmXftFTEAVPy7ZSU24NlY30kzT6gcaHHwKbmCBHop
-----END PRIVATE KEY-----
"""
TLS_CERT = """\
-----BEGIN CERTIFICATE-----
MIIBazCCARGgAwIBAgIBATAKBggqhkjOPQQDAjAWMRQwEgYDVQQDDAtlbnZidXMg
dGVzdDAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowFjEUMBIGA1UE
AwwLZW52YnVzIHRlc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATh/mignMB+
c5qjayUp3LAgLSTMF73/6xf9XjkZngbhW4/LmXftFTEAVPy7ZSU24NlY30kzT6gc
aHHwKbmCBHopo04wTDAPBgNVHRMBAf8EBTADAQH/MB0GA1UdDgQWBBSq3C1plO+q
898I/cRuLrw3MwWiYjAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhALGGYr7Eu7mHp/QEKxPXKzaiYrJq1b18mexq68urStncAiBz
p6RjjjYrn7KNJjLysYLcGrTKDOKuzqNwK4ICUfvfzw==
-----END CERTIFICATE-----
"""


@pytest.fixture(autouse=True)
def cli_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty configuration directory of the NATS CLI."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    directory = tmp_path / "nats" / "context"
    directory.mkdir(parents=True)
    return tmp_path / "nats"


@pytest.fixture
def tls_files(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text(TLS_CERT)
    key.write_text(TLS_KEY)
    return cert, key


def write_context(cli_home: Path, name: str, **settings: Any) -> None:
    (cli_home / "context" / f"{name}.json").write_text(json.dumps(settings))


# ---- forms of an address


@pytest.mark.parametrize(
    ("address", "servers"),
    [
        ("host", ["nats://host:4222"]),
        ("host:5222", ["nats://host:5222"]),
        ("nats://Host.Example/", ["nats://host.example:4222"]),
        ("tls://host", ["tls://host:4222"]),
        ("nats://[::1]", ["nats://[::1]:4222"]),
        ("nats://[::1]:5222", ["nats://[::1]:5222"]),
        ("a, b:1 ,nats://c", ["nats://a:4222", "nats://b:1", "nats://c:4222"]),
        (["a", "b,c"], ["nats://a:4222", "nats://b:4222", "nats://c:4222"]),
        ("ws://host", ["ws://host:80"]),
        ("wss://host/nats", ["wss://host:443/nats"]),
    ],
)
def test_addresses_are_normalised(address: str | list[str], servers: list[str]) -> None:
    options = resolve_bus_options(address)
    assert list(options.servers) == servers
    assert options.describe() == ", ".join(servers)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://host:4222", "use nats:// or tls://"),
        ("nats://", "not of the form"),
        ("nats://host:port", "not of the form"),
        ("nats://host:0", "1 to 65535"),
        ("nats://host:70000", "1 to 65535"),
        ("nats://host/path", "has no path"),
        ("nats://ho st", "not of the form"),
        ("nats://a,tls://b", "mix nats and tls"),
        ("nats://a,ws://b", "mix nats and ws"),
        (" , ", "no NATS address"),
    ],
)
def test_malformed_addresses_are_named(address: str, problem: str) -> None:
    """P58"""
    with pytest.raises(UsageError, match=problem):
        resolve_bus_options(address)


def test_userinfo_becomes_credentials() -> None:
    both = resolve_bus_options("nats://bob:p%40ss%2C@a,b")
    assert (both.user, both.password, both.describe()) == ("bob", SecretStr("p@ss,"), "nats://a:4222, nats://b:4222")
    assert both.nats_kwargs() == {
        "servers": ["nats://a:4222", "nats://b:4222"],
        "inbox_prefix": "_INBOX",
        "user": "bob",
        "password": "p@ss,",
    }
    assert resolve_bus_options("tok%21en@a").nats_kwargs()["token"] == "tok!en"
    assert resolve_bus_options("nats://u:p@a,nats://u:p@b").user == "u"


def test_arguments_replace_credentials_of_the_address() -> None:
    options = resolve_bus_options(f"nats://{SECRET}@a", user="bob", password="pw", inbox_prefix="_INBOX_bob")
    assert options == BusOptions(
        servers=("nats://a:4222",), user="bob", password=SecretStr("pw"), inbox_prefix="_INBOX_bob"
    )


def test_finished_options_are_taken_and_can_be_changed() -> None:
    options = BusOptions(servers=("a",), token=SecretStr(SECRET))
    assert resolve_bus_options(options) == options
    assert resolve_bus_options(options, user="u", password="p").token is None


def test_options_are_hashable_and_travel_to_other_processes() -> None:
    options = resolve_bus_options("nats://bob:pw@a")
    assert {options: 1}[resolve_bus_options("bob:pw@a:4222")] == 1
    assert options != resolve_bus_options("bob:other@a")
    assert pickle.loads(pickle.dumps(options)) == options


# ---- where an address comes from


def test_order_of_sources(cli_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="ENVBUS_URL or NATS_URL"):
        resolve_bus_options()
    assert find_bus_options() is None
    (cli_home / "context.txt").write_text("selected\n")
    write_context(cli_home, "selected", url="selected")
    write_context(cli_home, "other", url="other")
    write_context(cli_home, "argument", url="argument")
    assert resolve_bus_options().describe() == "nats://selected:4222"
    assert find_bus_options() is None
    for name, value in {"ENVBUS_CONTEXT": "other", "NATS_URL": "nats-url", "ENVBUS_URL": "envbus-url"}.items():
        monkeypatch.setenv(name, value)
        assert resolve_bus_options().describe() == f"nats://{value}:4222"
        assert find_bus_options() == resolve_bus_options()
    assert resolve_bus_options(context="argument").describe() == "nats://argument:4222"
    assert resolve_bus_options("address").describe() == "nats://address:4222"
    monkeypatch.setenv("ENVBUS_URL", "")
    assert resolve_bus_options().describe() == "nats://nats-url:4222"


def test_credentials_without_an_address_are_not_ignored() -> None:
    with pytest.raises(UsageError, match="token given, but no NATS address") as caught:
        find_bus_options(token=SECRET)
    assert SECRET not in str(caught.value)


def test_context_settings(cli_home: Path, tls_files: tuple[Path, Path]) -> None:
    cert, key = tls_files
    write_context(
        cli_home,
        "full",
        description="ignored",
        url="tls://a,tls://b",
        user="bob",
        password=SECRET,
        token="",
        inbox_prefix="_INBOX_bob",
        ca=str(cert),
        cert=str(cert),
        key=str(key),
        tls_first=True,
    )
    options = resolve_bus_options(context="full")
    assert options == BusOptions(
        servers=("tls://a:4222", "tls://b:4222"),
        user="bob",
        password=SecretStr(SECRET),
        context_file=cli_home / "context" / "full.json",
        inbox_prefix="_INBOX_bob",
        tls_ca_file=cert,
        tls_cert_file=cert,
        tls_key_file=key,
        tls_handshake_first=True,
    )
    assert resolve_bus_options("tls://elsewhere", context="full").servers == ("tls://elsewhere:4222",)
    assert resolve_bus_options("tls://elsewhere", context="full").user == "bob"


def test_context_credentials(cli_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.creds").write_text(CREDS)
    (tmp_path / "my.nk").write_text(SEED + "\n")
    write_context(cli_home, "creds", creds="~/my.creds", nkey="~/my.nk", token=SECRET)
    write_context(cli_home, "nkey", url="nats://x@a", nkey="~/my.nk", token=SECRET)
    write_context(cli_home, "token", token=SECRET)
    assert resolve_bus_options(context="creds").nats_kwargs() == {
        "servers": ["nats://127.0.0.1:4222"],
        "inbox_prefix": "_INBOX",
        "user_credentials": str(tmp_path / "my.creds"),
    }
    assert resolve_bus_options(context="nkey").nats_kwargs()["nkeys_seed"] == str(tmp_path / "my.nk")
    assert resolve_bus_options(context="token").nats_kwargs()["token"] == SECRET


@pytest.mark.parametrize("name", ["missing", "../nats/context/there", "/etc/passwd"])
def test_unknown_context_lists_those_that_exist(name: str, cli_home: Path) -> None:
    write_context(cli_home, "there", url="a")
    with pytest.raises(UsageError, match=r"no NATS CLI context .*there are: there"):
        resolve_bus_options(context=name)


@pytest.mark.parametrize("text", [f'{{"token": "{SECRET}"', f'["{SECRET}"]', "", f'{{"user": ["{SECRET}"]}}'])
def test_broken_context_is_named_without_its_content(text: str, cli_home: Path) -> None:
    (cli_home / "context" / "bad.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        resolve_bus_options(context="bad")
    assert SECRET not in str(caught.value)


def test_context_with_an_nsc_lookup_is_refused(cli_home: Path) -> None:
    write_context(cli_home, "nsc", nsc="nsc://operator/account/user")
    with pytest.raises(UsageError, match="'nsc', which envbus does not support; use creds"):
        resolve_bus_options(context="nsc")


# ---- what does not fit together


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"user": "bob"}, "user and password must be given together"),
        ({"user": "bob", "password": SECRET, "token": SECRET}, "several kinds of credentials: user, token"),
        ({"creds_file": "/no/such.creds"}, "cannot read /no/such.creds: No such file"),
        ({"creds_file": __file__}, "is not a NATS creds file"),
        ({"nkey_seed_file": "/no/such.nk"}, "cannot read /no/such.nk"),
        ({"nkey_seed_file": __file__}, "is not the nkey seed of a user"),
        ({"inbox_prefix": "_INBOX_x.>"}, "without wildcards"),
        ({"inbox_prefix": "a..b"}, "is not a subject"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, str], problem: str) -> None:
    """P53, P58"""
    if arguments.get("creds_file") == __file__:
        arguments = {"creds_file": pytest.__file__}
    with pytest.raises(UsageError, match=problem) as caught:
        resolve_bus_options("a", **arguments)  # type: ignore[arg-type]
    assert SECRET not in str(caught.value)


def test_bad_tls_settings_are_named(tls_files: tuple[Path, Path]) -> None:
    cert, key = tls_files
    with pytest.raises(ValidationError, match="needs a TLS certificate file"):
        BusOptions(servers=("tls://a",), tls_key_file=key)
    with pytest.raises(ValidationError, match="wss://"):
        BusOptions(servers=("ws://a",), tls_ca_file=cert)
    with pytest.raises(UsageError, match=re.escape(str(key))):
        BusOptions(servers=("tls://a",), tls_ca_file=key).nats_kwargs()


# ---- contexts by path


def test_a_context_may_be_anywhere(
    cli_home: Path, tmp_path: Path, tls_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P53: files that it names are relative to its folder, wherever this process is; by argument or ENVBUS_CONTEXT."""
    folder = tmp_path / "bus" / "contexts"
    (folder.parent / "users").mkdir(parents=True)
    folder.mkdir()
    (folder.parent / "users" / "bob.nk").write_text(SEED)
    (folder / "ca.pem").write_text(tls_files[0].read_text())
    settings = {"url": "tls://a", "nkey": "../users/bob.nk", "ca": "ca.pem", "inbox_prefix": "_INBOX_bob"}
    (folder / "bob.json").write_text(json.dumps(settings))
    expected = BusOptions(
        servers=("tls://a:4222",),
        nkey_seed_file=folder / "../users/bob.nk",
        tls_ca_file=folder / "ca.pem",
        inbox_prefix="_INBOX_bob",
    )
    monkeypatch.chdir(tmp_path / "bus")
    assert resolve_bus_options(context="contexts/bob.json") == expected
    monkeypatch.chdir("/")
    monkeypatch.setenv("ENVBUS_CONTEXT", str(folder / "bob.json"))
    assert resolve_bus_options() == expected
    monkeypatch.setenv("ENVBUS_URL", "nats://other")
    assert resolve_bus_options().servers == ("nats://other:4222",)
    assert resolve_bus_options(context=str(folder / "bob.json")) == expected, "what is named counts more"


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, "cannot read .*no.json: No such file"), ("[]", "not a JSON object"), ("{", "not a JSON object")],
)
def test_a_context_of_no_use_is_named(text: str | None, problem: str, tmp_path: Path) -> None:
    """P58"""
    if text is not None:
        (tmp_path / "no.json").write_text(text)
    with pytest.raises(UsageError, match=problem):
        resolve_bus_options(context=str(tmp_path / "no.json"))


def test_a_password_in_a_context_is_read_for_every_connection(tmp_path: Path) -> None:
    """P53: it may have been renewed; one that was given beside the context stays."""
    file = tmp_path / "bob.json"
    file.write_text(json.dumps({"url": "nats://a", "user": "bob", "password": "old"}))
    options, given = resolve_bus_options(context=str(file)), resolve_bus_options(context=str(file), token=SECRET)
    file.write_text(json.dumps({"url": "nats://elsewhere", "user": "bobby", "password": "new"}))
    renewed = options.nats_kwargs()
    assert (renewed["servers"], renewed["user"], renewed["password"]) == (["nats://a:4222"], "bobby", "new")
    assert given.nats_kwargs()["token"] == SECRET
    file.unlink()
    with pytest.raises(UsageError, match="cannot read"):
        options.nats_kwargs()


# ---- secrets


@given(st.text(min_size=1, max_size=12))
def test_a_password_with_any_characters_arrives_or_the_error_hides_it(tail: str) -> None:
    """Quoted it arrives; unquoted it arrives or is refused, and is shown nowhere."""
    password = SECRET + tail
    quoted = resolve_bus_options(f"nats://bob:{quote(password, safe='')}@host")
    assert quoted.nats_kwargs()["password"] == password
    assert SECRET not in everything_shown(quoted)
    token = password.replace(":", "")  # what stands before a colon is a user name, not a secret
    for address in (
        f"nats://bob:{password}@host",
        f"bob:{password}@a,b",
        f"http://bob:{password}@host",
        f"{token}@a,b",
        [f"tls://{token}@a"],
    ):
        assert SECRET not in outcome(address)


def everything_shown(options: BusOptions) -> str:
    return f"{options}{options!r}{options.describe()}{options.model_dump_json()}"


def outcome(address: str | list[str]) -> str:
    try:
        return everything_shown(resolve_bus_options(address))
    except UsageError as error:
        return f"{error}{error!r}{error.__cause__!r}"


@pytest.mark.parametrize(
    "fields",
    [
        {"servers": (f"nats://bob:{SECRET}@host",)},
        {"servers": ("a",), "passwd": SECRET},
        {"servers": ("a",), "password": SECRET},
        {"servers": ("a",), "token": SECRET, "user": "u", "password": "p"},
        {"servers": ("a",), "nkey_seed": SECRET},
    ],
)
def test_validation_errors_hide_what_was_given(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        BusOptions(**fields)
    assert SECRET not in str(caught.value)


# ---- with nats-py


@contextlib.asynccontextmanager
async def connected(options: BusOptions, **kwargs: Any) -> AsyncIterator[Client]:
    async def on_error(error: Exception) -> None: ...

    client = await nats.connect(**options.nats_kwargs(), error_cb=on_error, **kwargs)
    try:
        yield client
    finally:
        await client.close()


async def respond(message: Msg) -> None:
    await message.respond(message.data)


async def echo(options: BusOptions) -> None:
    async with connected(options, allow_reconnect=False) as client:
        subscription = await client.subscribe("echo", cb=respond)
        assert (await client.request("echo", b"hello", timeout=20)).data == b"hello"
        await subscription.unsubscribe()


def tls_config(files: tuple[Path, Path], more: str = "") -> str:
    return f"tls {{ cert_file: '{files[0]}', key_file: '{files[1]}' }}\n{more}"


AUTHORIZATIONS: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("authorization { user: bob, password: pw }", {"user": "bob", "password": "pw"}),
    ("authorization { token: tok }", {"token": "tok"}),
    (f"authorization {{ users: [ {{ nkey: {NKEY} }} ] }}", {"nkey_seed": SEED}),
]


@pytest.mark.parametrize("loop_run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize(("authorization", "credentials"), AUTHORIZATIONS)
def test_every_kind_of_credentials_works_with_and_without_tls(
    authorization: str, credentials: dict[str, Any], loop_run: Callable[[Any], None], tls_files: tuple[Path, Path]
) -> None:
    async def check() -> None:
        async with EmbeddedNats(config=authorization) as server:
            await echo(BusOptions(servers=(server.url,), **credentials))
        async with EmbeddedNats(config=tls_config(tls_files, authorization)) as server:
            await echo(BusOptions(servers=(f"tls://localhost:{server.port}",), tls_ca_file=tls_files[0], **credentials))

    loop_run(check())


async def test_handshake_first(tls_files: tuple[Path, Path]) -> None:
    config = tls_config(tls_files).replace("}", ", handshake_first: true }")
    async with EmbeddedNats(config=config) as server:
        address = (f"tls://localhost:{server.port}",)
        await echo(BusOptions(servers=address, tls_ca_file=tls_files[0], tls_handshake_first=True))


async def test_a_certificate_of_another_name_or_authority_is_refused(tls_files: tuple[Path, Path]) -> None:
    async with EmbeddedNats(config=tls_config(tls_files)) as server:
        with pytest.raises(OSError, match="certificate verify failed"):
            await echo(BusOptions(servers=(f"tls://localhost:{server.port}",)))


class PlainGreeter:
    """Greets like a NATS server without TLS and keeps what clients send it."""

    def __init__(self) -> None:
        self.received = b""
        self.visits: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","headers":true,"nonce":"abc","max_payload":1024}\r\n')
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(0.2):
                self.received += await reader.read()
        writer.close()
        self.visits.put_nowait(None)


@pytest.mark.parametrize("credentials", [credentials for _, credentials in AUTHORIZATIONS])
@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_nothing_is_sent_to_a_server_without_tls_when_tls_is_required(
    scheme: str, credentials: dict[str, Any], tls_files: tuple[Path, Path]
) -> None:
    """Also with a nats:// address when a CA file is given."""
    greeter = PlainGreeter()
    async with tcp_server(greeter) as port:
        options = BusOptions(servers=(f"{scheme}://127.0.0.1:{port}",), tls_ca_file=tls_files[0], **credentials)
        client = Client()
        with pytest.raises(OSError, match="TLS is required"):
            await client.connect(**options.nats_kwargs(), allow_reconnect=False)
        await client.close()
        async with asyncio.timeout(20):
            await greeter.visits.get()
    assert greeter.received == b""


@pytest.mark.parametrize("scheme", ["tls", "nats", "wss"])
# nats-py's WebSocket: how it calls aiohttp, and that it leaves the session of a failed try to the garbage collector.
@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning", "ignore:.*nclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_nothing_in_clear_text_where_tls_comes_first(scheme: str, tls_files: tuple[Path, Path]) -> None:
    """P53: with tls_first, and over a WebSocket: the other side gets the start of a handshake, and no more."""
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","headers":true,"nonce":"abc","max_payload":1024}\r\n')
        received.put_nowait(await reader.read(100_000))
        writer.close()

    async with tcp_server(greet) as port:
        address = f"{scheme}://127.0.0.1:{port}"
        options = BusOptions(
            servers=(address,), tls_ca_file=tls_files[0], tls_handshake_first=True, user="bob", password=SECRET
        )
        with pytest.raises(BusUnreachableError):
            await Connection(options, name="test").open(timeout_s=0.5)
        first = await asyncio.wait_for(received.get(), 20)
    assert first[:1] == b"\x16", "a TLS record"
    assert SECRET.encode() not in first
    assert b"bob" not in first
    gc.collect()


@pytest.mark.parametrize("credentials", [{"token": "tok"}, {"user": "bob", "password": "tok"}])
async def test_a_handshake_counts_for_one_connection(credentials: dict[str, Any], tls_files: tuple[Path, Path]) -> None:
    async with EmbeddedNats(config=tls_config(tls_files)) as server:
        options = BusOptions(servers=(f"tls://localhost:{server.port}",), tls_ca_file=tls_files[0], **credentials)
        kwargs = options.nats_kwargs()
        client = await nats.connect(**kwargs, allow_reconnect=False)
        with pytest.raises(OSError, match="TLS is required"):
            (kwargs.get("token") or kwargs["password"])()
        await client.close()


def test_an_unfinished_handshake_counts_for_none(tls_files: tuple[Path, Path]) -> None:
    kwargs = BusOptions(servers=("tls://localhost",), tls_ca_file=tls_files[0]).nats_kwargs()
    kwargs["tls"].wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost")
    with pytest.raises(OSError, match="TLS is required"):
        kwargs["token"]()


# nats-py 2.16 leaves the socket of a failed reconnect to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_no_downgrade_on_reconnect(tls_files: tuple[Path, Path]) -> None:
    """A good handshake does not vouch for the next connection."""
    greeter = PlainGreeter()
    async with EmbeddedNats(config=tls_config(tls_files)) as nats_server:
        port = nats_server.port
        options = BusOptions(servers=(f"tls://127.0.0.1:{port}",), tls_ca_file=tls_files[0], token=SecretStr(SECRET))
        async with connected(options, reconnect_time_wait=0.01, max_reconnect_attempts=-1) as client:
            await nats_server.stop()
            async with tcp_server(greeter, port=port), asyncio.timeout(30):
                for _ in range(3):
                    await greeter.visits.get()
                assert not client.is_connected
    assert greeter.received == b""
    del client
    gc.collect()


async def test_inbox_prefix_lets_a_restricted_user_get_replies() -> None:
    """P53"""
    config = """authorization { users: [
        { user: env, password: pw },
        { user: trainer, password: pw, permissions: { publish: "echo", subscribe: "_INBOX_trainer.>" } } ] }"""
    async with EmbeddedNats(config=config) as server:
        arguments = {"user": "trainer", "password": "pw"}
        denied = resolve_bus_options(server.url, **arguments)  # type: ignore[arg-type]
        allowed = resolve_bus_options(server.url, inbox_prefix="_INBOX_trainer", **arguments)  # type: ignore[arg-type]
        async with connected(resolve_bus_options(server.url, user="env", password="pw")) as env:
            await env.subscribe("echo", cb=respond)
            await env.flush()
            async with connected(denied) as client:
                with pytest.raises(nats.errors.TimeoutError):
                    await client.request("echo", b"hello", timeout=0.3)
            async with connected(allowed) as client:
                assert (await client.request("echo", b"hello", timeout=20)).data == b"hello"
