"""What is no plain http or https URL is refused when it is named (P46); what patterns of an operator allow."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from envbus.cli.providers import choose_endpoint
from envbus.controller.spec import read_fleet_file
from envbus.environments.model_client import environment_key
from envbus.errors import ModelAddressError, ModelKeyError, UsageError
from envbus.model_urls import LOOPBACK_PATTERNS, UrlPattern, is_reserved, read_key_pair, read_origin
from envbus.server.model_endpoints import KeyPolicy
from envbus.types import ClientConfig, EndpointConfig

NO_URLS = [
    "localhost:8000",
    "ftp://x/v1",
    "http://",
    "/v1",
    "http://[x",
    "http://x:port/",
    "http://x:0",
    "http://x:65536",
    "http://user@x/v1",
    "http://user:word@x/v1",
    "http://x/v1?key=word",
    "http://x/v1#word",
    "http://x\\@y/v1",
    "http://x./v1",
    "http://x..y",
    "http://-x",
    "http://x%41/v1",
    "http://é/v1",
    "http://127.1",
    "http://0x7f.0.0.1",
    "http://2130706433",
    "http://0177.0.0.1",
    "http://1.2.3.4.5",
    "http://[fe80::1%25lo]",
]
NO_URLS += ["", "http://x y", "http://x/v1\n"]
NEVER = [
    "169.254.169.254",
    "169.254.0.1",
    "fe80::1",
    "fe80::1%eth0",
    "fd00:ec2::254",
    "100.100.100.200",
    "168.63.129.16",
    "::ffff:169.254.169.254",
    "::169.254.169.254",
    "::ffff:0:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "metadata.google.internal",
]
NO_PATTERNS = [
    "10.0.*",
    "http://",
    "http://*",
    "https://*:443",
    "http://a.*",
    "http://10.*.1",
    "http://300.*",
    "http://010.*",
    "http://*.5",
    "http://x/v1",
    "http://u@x",
    "http://10.0.*.*",
    "ftp://x",
    "http://x:y",
    "http://x:0",
    "http://*x*.y*",
    "http://169.254.169.254",
    "http://metadata.google.internal",
    "http://[fe80::*]",
    "http://x?*",
]
NO_PATTERNS += [""]
SENTENCE = "must be an http or https URL like http://localhost:8000/v1"


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_that_is_none_is_refused_with_the_sentence_of_the_command_line(url: str) -> None:
    """Its text is not in the error: it may hold a password."""
    for kind in (ClientConfig, EndpointConfig):
        with pytest.raises(ValidationError, match=SENTENCE) as refused:
            kind(api_base_url=url)
        assert "word" not in str(refused.value)
        assert "word" not in repr(refused.value)
    with pytest.raises(UsageError, match=SENTENCE) as told:
        choose_endpoint(None, url, None, extra_headers={}, keys_here=False)
    assert "word" not in str(told.value)


@pytest.mark.parametrize(
    "url", ["http://localhost:8000", "https://[::1]/v1", "HTTP://x", "http://node_1:8000/v1/a%2Fb"]
)
def test_other_urls_are_taken(url: str) -> None:
    assert ClientConfig(api_base_url=url).api_base_url == url


@pytest.mark.parametrize("name", ["", "A B", "A=B", "A\nB", "A\0", "1A", "Ä", "A" * 257])
def test_what_can_be_no_variable_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="api_key_var"):
        EndpointConfig(api_key_var=name)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("HTTPS://API.Example.com:443/v1", "https://api.example.com"),
        ("http://x:80", "http://x"),
        ("https://x:80/", "https://x:80"),
        ("http://[0:0:0:0:0:0:0:1]:8000", "http://[::1]:8000"),
        ("http://[::ffff:10.0.0.1]", "http://10.0.0.1"),
    ],
)
def test_an_origin_has_one_form(url: str, origin: str) -> None:
    assert str(read_origin(url)) == origin


@pytest.mark.parametrize("host", NEVER)
def test_addresses_that_nobody_calls(host: str) -> None:
    assert is_reserved(host)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "10.0.0.1", "100.100.100.201", "fd00::1", "model.example", "169.253.1.1"]
)
def test_addresses_that_may_be_called(host: str) -> None:
    assert not is_reserved(host)


def test_they_are_refused_in_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelAddressError, match="link-local or metadata"):
        environment_key(EndpointConfig(api_base_url="http://169.254.169.254/v1", api_key_var=None))
    with pytest.raises(ModelAddressError, match="link-local or metadata"):
        KeyPolicy(["*"]).key(EndpointConfig(api_base_url="http://[fe80::1]/v1"))


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        (
            "http://10.0.*",
            ["http://10.0.1.2", "http://10.0.255.255:80/v1"],
            ["http://10.0.1.2:8000", "http://10.1.0.1"],
        ),
        (
            "http://10.0.*:*",
            ["http://10.0.1.2:1"],
            ["https://10.0.1.2:1", "http://10.0.example:1", "http://110.0.1.2:1"],
        ),
        ("http://10.*:8000", ["http://10.1.2.3:8000"], ["http://10.example:8000", "http://101.2.3.4:8000"]),
        (
            "https://*.a.example",
            ["https://x.a.example", "https://y.x.a.example"],
            ["https://a.example", "https://xa.example"],
        ),
        (
            "http://node-*:8000",
            ["http://node-1:8000", "http://NODE-a:8000"],
            ["http://node-1.evil:8000", "http://xnode-1:8000"],
        ),
        ("http://m*.lan", ["http://model.lan"], ["http://m.x.lan", "http://model.lan.evil"]),
        ("http://1*:*", ["http://1a:5"], ["http://10.0.0.1", "http://127.0.0.1:5"]),
        ("HTTP://Model:8000/", ["http://model:8000"], ["http://model", "http://model:8001"]),
        ("http://[::1]:*", ["http://[::1]:9", "http://[0::1]"], ["http://127.0.0.1:9"]),
    ],
)
def test_what_a_pattern_allows(pattern: str, allowed: list[str], refused: list[str]) -> None:
    read = UrlPattern.read(pattern)
    assert all(read.allows(read_origin(url)) for url in allowed)
    assert not any(read.allows(read_origin(url)) for url in refused)


@pytest.mark.parametrize("pattern", NO_PATTERNS)
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        UrlPattern.read(pattern)
    with pytest.raises(UsageError, match="--allow-url"):
        KeyPolicy(allow_urls=[pattern])


@pytest.mark.parametrize(
    "entry", ["sk-secret", "sk-secret=https://x", "KEY=sk-secret", "KEY=https://u:sk-secret@x", "K=https://x/v1"]
)
def test_what_is_no_pair_is_not_repeated(entry: str) -> None:
    with pytest.raises(UsageError, match="--allow-key: ") as refused:
        KeyPolicy([entry])
    assert "secret" not in str(refused.value)


def test_a_key_of_an_allowed_origin_allows_calls_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "value-of-a")
    policy = KeyPolicy(["A_KEY=https://a.example:443/"], LOOPBACK_PATTERNS)
    assert policy.key(EndpointConfig(api_base_url="https://A.example/v1", api_key_var="A_KEY")) == "value-of-a"
    for url in ("https://a.example/v1", "http://localhost:1/v1", "http://[::1]:1/v1", "https://127.0.0.1:1"):
        assert policy.key(EndpointConfig(api_base_url=url, api_key_var=None))
    assert not policy.allows_all
    assert KeyPolicy(["*"]).allows_all
    assert read_key_pair("A=http://x:80")[1] == read_origin("http://X/v1")


@pytest.mark.parametrize("value", ["", " ", "a b\nc", "kéy", "a\0"])
def test_a_value_that_can_be_no_key_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP library would quote it in its error."""
    endpoint = EndpointConfig(api_base_url="http://a", api_key_var="A_KEY")
    if "\0" not in value:
        monkeypatch.setenv("A_KEY", value)
    for source in (environment_key, KeyPolicy(["A_KEY=http://a"]).key):
        with pytest.raises(ModelKeyError, match="A_KEY"):
            source(endpoint)
    monkeypatch.setenv("A_KEY", " from-a-file\n")
    assert environment_key(endpoint) == KeyPolicy(["A_KEY=http://a"]).key(endpoint) == "from-a-file"


def test_a_fleet_file_is_checked_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    for line, word in (
        ("allow_keys = ['KEY=sk-secret']", "VARIABLE=https://host"),
        ("allow_urls = ['10.*']", "SCHEME://"),
    ):
        file.write_text(f'[[env]]\nid = "a"\n{line}\n')
        with pytest.raises(UsageError, match=rf"fleet.toml:3: env\[0\].*{word}") as refused:
            read_fleet_file(file)
        assert "secret" not in str(refused.value)
    file.write_text('[[env]]\nid = "a"\nallow_urls = ["http://10.0.*:*", "*"]\nmodel_proxy = true\n')
    assert read_fleet_file(file).env[0].model_proxy


def test_a_policy_knows_that_it_allows_nothing() -> None:
    assert KeyPolicy().none_allowed
    for policy in (KeyPolicy(["*"]), KeyPolicy(["K=https://a.example"]), KeyPolicy(allow_urls=["http://a:*"])):
        assert not policy.none_allowed
