"""The folder of a NATS server: valid for nats-server, secrets private, everything kept that is there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from envbus.bus.address import resolve_bus_options
from envbus.bus.embedded import find_nats_server
from envbus.errors import UsageError
from envbus.provision.access import AccessSpec, access_of
from envbus.provision.folder import provision


def spec_of(**access: Any) -> AccessSpec:
    return access_of(**({"trainers": ["alice", "bob"], "servers": ["gpu1"]} | access))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("accounts", [False, True])
@pytest.mark.parametrize("credentials", ["nkeys", "passwords"])
@pytest.mark.parametrize("tls", [None, False, True])
def test_nats_server_takes_each_configuration(
    tmp_path: Path, certs: Path, accounts: bool, credentials: str, tls: bool | None
) -> None:
    """``nats-server -t``: valid and not a word of warning."""
    encryption = None if tls is None else {"certificates": certs, "handshake_first": tls}
    listen = {"host": "::" if accounts else "0.0.0.0", "websocket_port": 4223, "monitoring_port": 4224}
    roles = {"operators": ["ops"], "controllers": ["ctl1"], "dashboards": ["wall"], "user": {"bob": {"envs": ["a b"]}}}
    spec = spec_of(accounts=accounts, credentials=credentials, tls=encryption, listen=listen, **roles)
    done = provision(spec, tmp_path)
    said = subprocess.run(
        [find_nats_server(), "-t", "-c", done.config_file], capture_output=True, text=True, check=False, timeout=30
    )
    assert said.returncode == 0, said.stderr
    assert len(said.stderr.split("\n")) == 2, said.stderr


@pytest.mark.parametrize("credentials", ["nkeys", "passwords"])
def test_secrets_are_for_their_owner_and_not_in_the_configuration(
    tmp_path: Path, certs: Path, credentials: str
) -> None:
    provision(spec_of(credentials=credentials, tls={"certificates": certs}), tmp_path / "site")
    for folder in ("users", "contexts"):
        assert (tmp_path / "site" / folder).stat().st_mode & 0o777 == 0o700
    private = [*tmp_path.rglob("*.nk"), *tmp_path.rglob("contexts/*"), *certs.rglob("*.key")]
    assert {file.stat().st_mode & 0o777 for file in private} == {0o600}
    config = (tmp_path / "site" / "nats.conf").read_text()
    secrets = [file.read_text() for file in tmp_path.rglob("*.nk")]
    secrets += [json.loads(file.read_text()).get("password") for file in tmp_path.rglob("contexts/*")]
    assert len([secret for secret in secrets if secret]) == 3
    assert not any(secret and secret in config for secret in secrets)


@pytest.mark.parametrize("credentials", ["nkeys", "passwords"])
def test_run_again_it_changes_nothing(tmp_path: Path, certs: Path, credentials: str) -> None:
    spec = spec_of(credentials=credentials, tls={"certificates": certs})
    assert provision(spec, tmp_path).made == ["gpu1", "alice", "bob"]
    before = contents(tmp_path), contents(certs)
    again = provision(spec, tmp_path)
    assert (again.made, again.kept) == ([], ["gpu1", "alice", "bob"])
    assert (contents(tmp_path), contents(certs)) == before


@pytest.mark.parametrize("credentials", ["nkeys", "passwords"])
def test_rotating_changes_the_files_of_one_user(tmp_path: Path, certs: Path, credentials: str) -> None:
    spec = spec_of(credentials=credentials, tls={"certificates": certs})
    provision(spec, tmp_path)
    before = contents(tmp_path) | contents(certs)
    provision(spec, tmp_path, rotate=["alice"])
    after = contents(tmp_path) | contents(certs)
    its_own = {"users/alice.nk"} if credentials == "nkeys" else {"contexts/alice.json"}
    its_own |= {"nats.conf", "users/alice.pub", "users/alice.pem", "users/alice.key"}
    assert {name for name in after if after[name] != before.get(name)} == its_own
    with pytest.raises(UsageError, match="cannot rotate 'nobody': no such user; there are alice, bob, gpu1"):
        provision(spec, tmp_path, rotate=["nobody"])


@pytest.mark.parametrize("credentials", ["nkeys", "passwords"])
def test_secrets_may_be_moved_away(tmp_path: Path, credentials: str) -> None:
    """Once handed over: the configuration stays the same without them."""
    spec = spec_of(credentials=credentials)
    config = provision(spec, tmp_path).config_file
    before = config.read_bytes()
    for secret in [*tmp_path.glob("users/*.nk"), *tmp_path.glob("contexts/*")]:
        secret.unlink()
    assert provision(spec, tmp_path).made == []
    assert config.read_bytes() == before
    assert not list(tmp_path.glob("users/*.nk"))


def test_a_rotation_that_was_cut_short_leaves_nothing_of_the_old_key(tmp_path: Path) -> None:
    """Its public half would come back to life once the new seed has been moved away."""
    provision(spec_of(), tmp_path)
    old = (tmp_path / "users" / "alice.pub").read_text()
    provision(spec_of(), tmp_path, rotate=["alice"])
    (tmp_path / "users" / "alice.pub").write_text(old)
    provision(spec_of(), tmp_path)
    (tmp_path / "users" / "alice.nk").unlink()
    assert old.strip() not in provision(spec_of(), tmp_path).config_file.read_text()


def test_users_come_and_go(tmp_path: Path) -> None:
    provision(spec_of(), tmp_path)
    seed = (tmp_path / "users" / "alice.nk").read_text()
    done = provision(spec_of(trainers=["alice", "carol"]), tmp_path)
    assert (done.made, done.kept, done.left) == (["carol"], ["gpu1", "alice"], ["bob"])
    assert (tmp_path / "users" / "alice.nk").read_text() == seed
    assert "bob" not in done.config_file.read_text()


def test_nkeys_can_become_passwords(tmp_path: Path) -> None:
    provision(spec_of(), tmp_path)
    assert provision(spec_of(credentials="passwords"), tmp_path).made == ["gpu1", "alice", "bob"]
    assert not list(tmp_path.glob("users/*.nk"))


def test_a_context_is_what_envbus_and_the_nats_cli_read(tmp_path: Path, certs: Path) -> None:
    """The folder may be moved: its paths are relative."""
    tls = {"certificates": certs, "handshake_first": True}
    provision(spec_of(url="tls://a.example:4222,tls://b.example:4222", tls=tls), tmp_path / "here")
    context = json.loads((tmp_path / "here" / "contexts" / "alice.json").read_text())
    assert context["nkey"] == "../users/alice.nk"
    options = resolve_bus_options(context=str(tmp_path / "here" / "contexts" / "alice.json"))
    assert options.servers == ("tls://a.example:4222", "tls://b.example:4222")
    assert options.inbox_prefix == "_INBOX_alice"
    assert options.tls_handshake_first
    assert options.tls_cert_file is not None
    assert options.tls_cert_file.resolve() == certs / "users" / "alice.pem"


@pytest.mark.parametrize("credentials", ["nkeys", "passwords"])
def test_contexts_follow_the_access_file(tmp_path: Path, credentials: str) -> None:
    context = tmp_path / "contexts" / "alice.json"
    provision(spec_of(credentials=credentials), tmp_path)
    before = json.loads(context.read_text())
    provision(spec_of(credentials=credentials, url="nats://moved.example:4222"), tmp_path)
    assert json.loads(context.read_text()) == before | {"url": "nats://moved.example:4222"}


def test_what_is_in_the_way_is_named(tmp_path: Path, certs: Path) -> None:
    provision(spec_of(), tmp_path)
    (tmp_path / "users" / "alice.nk").write_text("SUBROKEN")
    with pytest.raises(UsageError, match=r"alice\.nk: not the seed of an nkey .* --rotate alice"):
        provision(spec_of(), tmp_path)
    with pytest.raises(UsageError, match=r"no .*server\.pem|no .*ca\.pem"):
        provision(spec_of(tls={"certificates": tmp_path}), tmp_path)
    with pytest.raises(UsageError, match="cannot write to"):
        provision(spec_of(), tmp_path / "users" / "alice.nk")
