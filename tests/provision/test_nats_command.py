"""``envbus nats``: what it writes and says, and that no other command pays for it."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envbus.cli.main import app, run_app


def nats(*arguments: str) -> int:
    return run_app(app, ["nats", *arguments])


def test_all_by_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert nats("certs", "--out", "certs", "--host", "nats.example.org") == 0
    assert "written: certs/ca.pem, certs/server.pem" in capsys.readouterr().out
    roles = ["--trainers", "alice,bob", "--servers", "gpu1", "--operators", "ops"]
    roles += ["--controllers", "ctl1", "--dashboards", "wall"]
    options = ["--accounts", "--tls", "certs", "--url", "tls://nats.example.org", "--prefix", "rl", "--out", "site"]
    assert nats("conf", *roles, *options) == 0
    said = capsys.readouterr().out
    assert "site/nats.conf: an account per trainer, 6 users" in said
    assert "new nkeys: gpu1, alice, bob, ops, ctl1, wall" in said
    assert {file.stem for file in Path("site/contexts").iterdir()} == {"gpu1", "alice", "bob", "ops", "ctl1", "wall"}
    Path("certs/users/alice.pem").unlink()
    assert nats("conf", *roles, *options) == 0
    said = capsys.readouterr().out
    assert "new certificates, to be handed out: alice\n" in said
    assert "new nkeys" not in said
    config = Path("site/nats.conf").read_text()
    assert f'ca_file: "{tmp_path}/certs/ca.pem"' in config
    assert '{ service: "rl.*.rollout"' in config
    assert nats("certs", "--out", "certs") == 0
    assert "all is there" in capsys.readouterr().out


def test_options_win_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("access.toml").write_text('servers = ["gpu1"]\ntrainers = ["alice"]\naccounts = true\n')
    conf = ["conf", "access.toml", "--out", "site"]
    assert nats(*conf, "--one-account", "--passwords", "--trainers", "alice,carol") == 0
    said = capsys.readouterr().out
    assert "one account, 3 users" in said
    assert "new passwords: gpu1, alice, carol" in said
    assert nats(*conf, "--passwords", "--rotate", "alice") == 0
    said = capsys.readouterr().out
    assert "an account per trainer, 2 users" in said
    assert "new passwords: alice" in said
    assert "no longer on the bus, though their files are still there: carol" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["conf"], "name at least one of servers and one of trainers"),
        (["conf", "none.toml"], "cannot read the access file none.toml"),
        (["conf", "--trainers", "alice,", "--servers", "gpu1"], "trainers[1]: user ''"),
        (
            ["conf", "--trainers", "alice", "--servers", "gpu1", "--tls", "none"],
            "no none/ca.pem; make certificates: envbus",
        ),
        (["conf", "--trainers", "alice", "--servers", "gpu1", "--rotate", "bob"], "cannot rotate 'bob'"),
        (["certs", "--host", "a b"], "'a b' is neither a host name nor an IP address"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert nats(*arguments) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.startswith("error[usage]: ")
    assert len(said.splitlines()) == 1


def test_without_bcrypt_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = builtins.__import__

    def without_bcrypt(name: str, *rest: Any) -> Any:
        if name == "bcrypt":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_bcrypt)
    monkeypatch.chdir(tmp_path)
    assert nats("conf", "--trainers", "alice", "--servers", "gpu1", "--passwords") == 2
    assert "pip install 'envbus[provision]'" in capsys.readouterr().err


def test_other_commands_load_nothing_of_it() -> None:
    code = (
        "import sys, envbus.cli.main; "
        "print([name for name in sys.modules if name.partition('.')[0] in ('cryptography', 'bcrypt', 'nkeys', 'nacl') "
        "or name.startswith('envbus.provision')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
