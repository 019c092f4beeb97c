"""Wrong fleet files and damaged results: each error says where and what, or the run goes on as documented."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envbus.controller.isolation import Limits
from envbus.controller.policies import AutoscalePolicy, LivenessPolicy, RestartPolicy
from envbus.controller.spec import BusSpec, ControllerSpec, EnvSpec, FleetSpec, read_fleet_file
from envbus.errors import UsageError
from envbus.evaluation import generate, load_results
from envbus.evaluation.results import read_metadata, read_rows

# ---- fleet files

WRONG: tuple[str, ...] = (
    "-5",
    "100000000000000000000000",
    "1.5",
    "nan",
    "inf",
    "true",
    '""',
    '"x y"',
    '"\\u0000"',
    '"' + "a" * 300 + '"',
    "[]",
    "[1, [2]]",
    "{}",
    "{ a = 1 }",
    "1979-05-27T07:32:00Z",
    "[" * 60 + "]" * 60,
)
TABLES: dict[str, tuple[Any, str]] = {
    "bus": (BusSpec, '[bus]\n{line}\n[[env]]\nid = "a"\n'),
    "controller": (ControllerSpec, '[controller]\n{line}\n[[env]]\nid = "a"\n'),
    "env": (EnvSpec, '[bus]\nprefix = "p"\n[[env]]\n{id}{line}\n'),
    "autoscale": (AutoscalePolicy, '[[env]]\nid = "a"\n[env.autoscale]\n{line}\n'),
    "restart": (RestartPolicy, '[[env]]\nid = "a"\n[env.restart]\n{line}\n'),
    "limits": (Limits, '[[env]]\nid = "a"\n[env.limits]\n{line}\n'),
    "liveness": (LivenessPolicy, '[[env]]\nid = "a"\n[env.liveness]\n{line}\n'),
}


def fleet_files() -> Iterator[str]:
    for kind, template in TABLES.values():
        for key in [*kind.model_fields, "unknown_key", "a key"]:
            for value in WRONG:
                line = f'"{key}" = {value}'
                text = template.replace("{line}", line).replace("{id}", "" if key == "id" else 'id = "a"\n')
                yield text


def read(file: Path, text: str | bytes) -> FleetSpec | str:
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        return read_fleet_file(file)
    except UsageError as error:
        return str(error)


def test_wrong_values_of_every_key_are_named_with_their_line(tmp_path: Path) -> None:
    """Or are right: a few of these values are."""
    file = tmp_path / "fleet.toml"
    refused = 0
    for text in fleet_files():
        outcome = read(file, text)
        if isinstance(outcome, str):
            refused += 1
            assert "fleet.toml" in outcome, (text, outcome)
            assert "fleet.toml:" in outcome or "env 1" in outcome, (text, outcome)
            assert len(outcome) < 2_000, (text, outcome)
        else:
            assert outcome.env
    assert refused > 500


BROKEN = {
    "empty": b"",
    "NUL bytes": b'[[env]]\nid = "a"\n\x00',
    "not UTF-8": b'[[env]]\nid = "\xff"',
    "a byte order mark": b'\xef\xbb\xbf[[env]]\nid = "a"',
    "a key twice": b'[[env]]\nid = "a"\nid = "b"',
    "a table twice": b'[bus]\n[bus]\n[[env]]\nid = "a"',
    "env is one table": b'[env]\nid = "a"',
    "env is a string": b'env = "a"',
    "env of strings": b'env = ["a"]',
    "bus is a string": b'bus = "nats://h"\n[[env]]\nid = "a"',
    "deep": b"a = " + b"[" * 100_000,
    "deep tables": b"[" + b"a." * 2_000 + b"a]",
    "deep arguments": b'[[env]]\nid = "a"\nargs = { a = ' + b"[" * 200 + b"]" * 200 + b" }",
    "a date in arguments": b'[[env]]\nid = "a"\nargs = { a = 1979-05-27 }',
    "nan in arguments": b'[[env]]\nid = "a"\nargs = { a = nan }',
    "JSON": b'{"env": [{"id": "a"}]}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_fleet_file_is_named(tmp_path: Path, name: str) -> None:
    outcome = read(tmp_path / "fleet.toml", BROKEN[name])
    if name == "deep arguments" and isinstance(outcome, FleetSpec):
        return
    assert isinstance(outcome, str)
    assert "fleet.toml" in outcome
    assert len(outcome) < 1_000


def test_mutated_fleet_files_are_fleets_or_usage_errors(tmp_path: Path) -> None:
    good = b'[bus]\nembedded = true\n[controller]\nid = "c"\n[[env]]\nid = "a"\nargs = { level = 5 }\nreplicas = 3\n'
    rng = random.Random(3)
    for _ in range(400):
        text = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(3)] = rng.choice((b"", b"\x00", b"\xff", b"[", b'"', b"=\n", b"{", b"9" * 30))
        read(tmp_path / "fleet.toml", bytes(text))


def test_a_folder_is_no_fleet_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the fleet file"):
        read_fleet_file(tmp_path)


# ---- results


class Counting:
    """Runs rollouts and counts them."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    async def run_rollout(self, item: Any, *arguments: Any, **options: Any) -> Any:
        self.ran.append(item["example_id"])
        return {"example_id": item["example_id"], "prompt": [], "completion": [], "reward": 1.0, "metrics": {"m": 1.0}}

    async def run_group(self, items: Any, *arguments: Any, **options: Any) -> Any:
        return [await self.run_rollout(item) for item in items]


COUNT = 4


def evaluate(folder: Path) -> tuple[list[Any], Any]:
    """Run or resume; which examples ran, and the outcome."""
    runner = Counting()
    rows: Any = [{"prompt": [], "example_id": number} for number in range(COUNT)]
    outcome = asyncio.run(generate(runner, rows, None, "m", env_id="e", results_path=folder))
    return runner.ran, outcome


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run that is complete."""
    assert len(evaluate(tmp_path)[0]) == COUNT
    return tmp_path


def row(index: Any, **fields: Any) -> bytes:
    return json.dumps({"index": index, "example_id": index, "reward": 1.0} | fields).encode() + b"\n"


LINES: dict[str, tuple[bytes, int]] = {
    "empty file": (b"", 4),
    "cut last line": (b"".join(map(row, range(4)))[:-5], 1),
    "invalid UTF-8": (row(0) + b'{"index": 1, "a": "\xff"}\n' + row(2) + row(3), 1),
    "NUL bytes": (row(0) + b"\x00" * 4_096 + b"\n" + row(2) + row(3), 1),
    "sparse end": (b"".join(map(row, range(3))) + b"\x00" * 100_000, 1),
    "index twice": (b"".join(map(row, [0, 1, 1, 2, 3, 0])), 0),
    "index over the end": (b"".join(map(row, [0, 1, 2, 3, 4, 10**30])), 0),
    "no index": (b'{"reward": 1}\n' + row(1), 3),
    "index is no number": (row("0") + row(1.0) + row(None) + row([1]) + row(-1) + row(True), 4),
    "foreign keys": (b"".join(row(n, strange={"$float": "nan"}, another=[1]) for n in range(4)), 0),
    "wrong tags": (row(0, a={"$float": "x"}) + row(1, a={"$bytes": "%%%"}) + row(2, a={"$bytes": 5}) + row(3), 2),
    "huge line": (b'{"index": 0, "a": "' + b"x" * 20_000_000 + b'"}\n' + row(1), 2),
    "huge line that is none": (b"x" * 20_000_000 + b"\n" + row(1), 3),
    "deep line": (b'{"index": 0, "a": ' + b"[" * 200_000 + b"\n" + row(1), 3),
    "long number": (b'{"index": 0, "a": ' + b"1" * 10_000 + b"}\n" + row(1), 3),
    "carriage returns": (b"".join(map(row, range(4))).replace(b"\n", b"\r\n"), 0),
    "odd values": (
        row(0, reward="x", completion=5, prompt=None, error=None)
        + row(1, reward=None, metrics={"m": "x"}, timing={"total_s": "x"}, error={})
        + row(2, reward=[1], metrics=None, token_usage={"input_tokens": "x", "output_tokens": 1e300})
        + row(3, reward={"$float": "inf"}, metrics={"m": {"$float": "nan"}}, error=""),
        0,
    ),
    "malformed": (row(0, metrics=[1]) + row(1, timing=5) + row(2, token_usage="many") + row(3, metrics=True), 4),
    "errors": (row(0, error={"error": "E"}) + row(1, error="text") + row(2, error=5) + row(3, error={"a": 1}), 4),
}


@pytest.mark.parametrize("name", LINES)
def test_a_resume_runs_what_the_results_do_not_have(saved: Path, name: str) -> None:
    """P16: damaged rows are run again, the others are kept, and the summary has numbers."""
    data, missing = LINES[name]
    (saved / "results.jsonl").write_bytes(data)
    ran, outcome = evaluate(saved)
    assert len(ran) == missing
    assert len(outcome["outputs"]) == COUNT
    json.dumps(outcome["metadata"], allow_nan=False, default=str)
    assert set(read_rows(saved)) >= set(range(COUNT))
    assert len(load_results(saved)["outputs"]) >= COUNT
    assert evaluate(saved)[0] == []


METADATA = {
    "missing": None,
    "empty": b"",
    "cut": b'{"env_id": "e", "mod',
    "not UTF-8": b'{"env_id": "\xff"}',
    "NUL bytes": b"\x00" * 100,
    "a list": b"[]",
    "deep": b"[" * 200_000,
    "long number": b'{"a": ' + b"1" * 10_000 + b"}",
    "of another run": b'{"env_id": "other"}',
    "no fields": b"{}",
}


@pytest.mark.parametrize("name", METADATA)
def test_wrong_metadata_says_what_is_wrong(saved: Path, name: str) -> None:
    content, file = METADATA[name], saved / "metadata.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match="another results path") as caught:
        evaluate(saved)
    assert str(saved) in str(caught.value)
    assert len(str(caught.value)) < 1_000
    assert len(read_rows(saved)) == COUNT, "what was there is untouched"
    if name not in ("of another run", "no fields"):
        with pytest.raises(UsageError):
            read_metadata(saved)
