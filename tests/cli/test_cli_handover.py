"""vf-eval hands over to the verifiers package's own script where that is installed and no bus is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def fake_verifiers(tmp_path: Path) -> Path:
    (tmp_path / "fake_verifiers_eval.py").write_text(
        "import sys\ndef main():\n    print('theirs', sys.argv[1:])\n    return 7\n"
    )
    return tmp_path


def install(folder: Path, version: str) -> None:
    info = folder / f"verifiers-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nvf-eval = fake_verifiers_eval:main\n")


def vf_eval(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from envbus.cli.vf_eval import main; sys.exit(main())", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder), "PRIME_API_KEY": "", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("version", ["0.2.0", "0.10.1rc1", "1.0"])
def test_hands_over_with_the_same_arguments(fake_verifiers: Path, version: str) -> None:
    install(fake_verifiers, version)
    done = vf_eval(fake_verifiers, "gsm8k", "-n", "3", "-R")
    assert (done.returncode, done.stdout) == (7, "theirs ['gsm8k', '-n', '3', '-R']\n")


def test_hands_over_what_is_made_for_the_other(fake_verifiers: Path) -> None:
    """envbus-remote is an environment module for that library's tools; the bus may be named by a variable."""
    install(fake_verifiers, "0.1.14")
    done = vf_eval(fake_verifiers, "envbus-remote", "-n", "3", ENVBUS_URL="nats://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (7, "theirs ['envbus-remote', '-n', '3']\n")


@pytest.mark.parametrize(
    ("version", "arguments", "variables"),
    [
        ("0.1.14", ["reverse-text"], {}),
        ("0.2.0", ["reverse-text", "--address=nats://127.0.0.1:1", "-w", "1"], {}),
        ("0.2.0", ["reverse-text", "--demo-model", "-k", "X"], {}),
        ("0.2.0", ["reverse-text", "--workers", "0"], {}),
        ("0.2.0", ["reverse-text", "-x", "{}x"], {"NATS_URL": "nats://127.0.0.1:1"}),
        ("0.2.0", ["reverse-text", "-x", "{}x"], {"ENVBUS_URL": "nats://127.0.0.1:1"}),
        ("0.2.0", ["reverse-text", "-x", "{}x"], {"ENVBUS_CONTEXT": "fleet"}),
    ],
)
def test_stays_here_for_the_bus_and_for_old_versions(
    fake_verifiers: Path, version: str, arguments: list[str], variables: dict[str, str]
) -> None:
    install(fake_verifiers, version)
    done = vf_eval(fake_verifiers, *arguments, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith("error[usage]: ")
    assert "theirs" not in done.stdout


def test_works_without_verifiers(tmp_path: Path) -> None:
    done = vf_eval(tmp_path, "--help")
    assert done.returncode == 0
    assert "vf-eval" in done.stdout
