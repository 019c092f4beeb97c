"""deploy/nats/README.md: a stranger who runs every command of it has a fleet that two trainers share."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tcp_server import free_port

from envbus.provision.access import AccessSpec, Details, Limits, Listen, Tls, read_access_file

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "nats"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
COMMANDS_S = 120
STOP = "\nkill %2; wait %2\nkill %1; wait %1 || true\n"


def blocks(language: str) -> list[tuple[str, str]]:
    """The marks and texts of all blocks in a language."""
    found = re.findall(rf"^```{language}(?: (\S+))?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(mark, text) for mark, text in found]


def files() -> dict[str, str]:
    return {mark.removeprefix("file="): text for mark, text in blocks("toml")}


def test_the_access_file_shown_is_the_one_beside_it() -> None:
    assert files()["access.toml"] == (FOLDER / "roles.toml").read_text(encoding="utf-8")


def test_every_command_of_it(tmp_path: Path) -> None:
    """Issue 6: a fleet and two trainers run vf-eval over TLS with nkeys, also after a rotation by reload."""
    port = str(free_port())
    for file, text in files().items():
        (tmp_path / file).write_text(text.replace("4222", port))
    with (tmp_path / "access.toml").open("a") as access:
        access.write(f'[listen]\nhost = "127.0.0.1"\nport = {port}\n')
    commands = "".join(text for _, text in blocks("sh")).replace("pip install -e '.[provision]'\n", "")
    said = run(f"set -eum\n{commands}{STOP}", tmp_path)
    assert re.findall(r"failed +(\d of \d) failed", said) == ["0 of 4", "0 of 4"], said
    assert "all fine" in said  # the doctor
    assert re.search(r"servers +1 ready", said.rpartition("Reloaded server configuration")[2]), said
    assert (tmp_path / "alice.tar.gz").exists()


def run(script: str, folder: Path) -> str:
    """Run a script in a folder as a shell's user would; what it printed. Nothing of it is left."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    with (folder / "printed").open("w+b") as printed:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        try:
            code = shell.wait(COMMANDS_S)
        finally:
            end_session(shell.pid)
            shell.wait(10)
        printed.seek(0)
        said = printed.read().decode()
    assert code == 0, said
    return said


def end_session(leader: int) -> None:
    """Kill what is left of a session: with job control each command is a process group of its own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
        except OSError:
            continue
        if session == leader:
            os.kill(int(stat.parent.name), signal.SIGKILL)


def test_the_table_has_every_key_with_its_default() -> None:
    table = README.partition("## The access file")[2]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    said = {key: row[1].strip() for row in rows for key in re.findall(r"`([\w.]+)`", row[0])}
    tables = {"listen": Listen, "limits": Limits, "tls": Tls, "user.NAME": Details}
    keys = {key for key in AccessSpec.model_fields if key not in ("user", "listen", "limits", "tls")}
    keys |= {f"{name}.{key}" for name, table in tables.items() for key in table.model_fields}
    assert set(said) == keys
    for key, field in Limits.model_fields.items():
        assert said[f"limits.{key}"] == str(field.default)


@pytest.mark.parametrize("name", ["roles.toml", "accounts.toml"])
def test_the_shipped_access_files_are_right(name: str) -> None:
    spec = read_access_file(FOLDER / name)
    assert spec.accounts == (name == "accounts.toml")
    assert spec.tls is not None
