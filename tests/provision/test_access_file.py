"""The access file: what it says of whom, and errors that name file, line and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envbus.errors import UsageError
from envbus.provision.access import AccessSpec, access_of, read_access_file

USERS = 'servers = ["gpu1"]\ntrainers = ["alice"]\n'


def read(folder: Path, text: str, **overrides: object) -> AccessSpec:
    file = folder / "access.toml"
    file.write_text(text)
    return read_access_file(file, overrides=overrides)


def test_a_short_file(tmp_path: Path) -> None:
    spec = read(tmp_path, f'{USERS}operators = ["ops"]\n[user.ops]\ncalls = true\n[tls]\ncertificates = "certs"\n')
    assert [(user.name, user.role) for user in spec.users] == [
        ("gpu1", "server"),
        ("alice", "trainer"),
        ("ops", "operator"),
    ]
    assert [user.details.calls for user in spec.users] == [False, False, True]
    assert spec.client_url == "tls://127.0.0.1:4222"
    assert spec.tls is not None
    assert spec.tls.certificates == tmp_path / "certs"


def test_the_command_line_wins_also_inside_of_tables(tmp_path: Path) -> None:
    text = f'{USERS}[tls]\ncertificates = "certs"\nhandshake_first = true\n'
    spec = read(tmp_path, text, trainers=["carol"], tls={"certificates": tmp_path / "others"})
    assert spec.trainers == ["carol"]
    assert spec.tls is not None
    assert spec.tls.handshake_first
    assert spec.tls.certificates == tmp_path / "others"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{USERS}trainer = []\n", "access.toml:3: trainer: unknown key"),
        ("servers = ['gpu1']\ntrainers = ['a b']\n", "access.toml:2: trainers[0]: user 'a b': a name is 1 to 32"),
        (f"{USERS}accounts = 'yes'\n", "access.toml:3: accounts: Input should be a valid boolean"),
        (f"{USERS}\n[listen]\nport = 70000\n", "access.toml:5: listen.port: Input should be less than"),
        (f"{USERS}\n[listen]\nport = 4222\nwebsocket_port = 4222\n", "access.toml:4: listen: the ports must differ"),
        (f"{USERS}listen.port = 0\n", "access.toml:3: listen.port: Input should be greater than"),
        (f"{USERS}[limits]\nmax_payload = 1\n", "access.toml:4: limits.max_payload: unknown key"),
        (f"{USERS}[tls]\nhandshake_first = true\n", "access.toml:3: tls.certificates: is missing"),
        (f"{USERS}[user.bob]\ncalls = true\n", "access.toml:3: user.bob: no such user; name it in"),
        (f"{USERS}[user.alice]\n\ncalls = true\n", "access.toml:5: user.alice.calls: means nothing for a trainer"),
        (f"{USERS}[user.gpu1]\nenvs = ['']\n", "access.toml:4: user.gpu1.envs[0]: '' makes a subject token"),
        (f"{USERS}[user.'no good']\nenvs = []\n", "access.toml:3: user.no good: user 'no good': a name is"),
        (f"{USERS}prefix = 'a.*'\n", "access.toml:3: prefix: prefix 'a.*': use letters"),
        (f"{USERS}url = 'http://x'\n", "access.toml:3: url: http://x: its scheme is not one of NATS"),
        (f"{USERS}url = 'tls://x'\n", "access.toml:3: url: a tls:// address needs the table [tls]"),
        (f"{USERS}url = 'nats://x'\n[tls]\ncertificates = 'c'\n", "access.toml:3: url: with certificates it must be"),
        (f"{USERS}operators = ['alice']\n", "access.toml: user 'alice' is named twice"),
        ("servers = ['gpu1']\n", "access.toml: name at least one of servers and one of trainers"),
        ("servers = [\n", "access.toml: not TOML"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        read(tmp_path, text)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, f"{USERS}a = 1\nb = 2\n")
    assert [line.strip() for line in str(caught.value).splitlines()] == [
        f"{tmp_path}/access.toml:3: a: unknown key",
        f"{tmp_path}/access.toml:4: b: unknown key",
    ]


def test_without_a_file_errors_name_the_key() -> None:
    with pytest.raises(UsageError, match=r"^trainers\[1\]: user 'x\.y': a name is"):
        access_of(trainers=["alice", "x.y"], servers=["gpu1"])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the access file"):
        read_access_file(tmp_path / "none.toml")
