"""The pure parts of the command line: flags, endpoints, places, and the summary's text."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from envbus.bus.address import BusOptions
from envbus.cli.arguments import headers, json_object, with_resume_value
from envbus.cli.display import EvalDisplay
from envbus.cli.eval_plan import choose_mode, choose_results_path, merge_sampling_args
from envbus.cli.formats import duration
from envbus.cli.providers import choose_endpoint
from envbus.cli.reporting import print_error
from envbus.cli.summary import print_summary, summary_json
from envbus.error_chain import error_info
from envbus.errors import ServerLostError, UsageError
from envbus.evaluation import summarize
from envbus.types import GenerateMetadata, RolloutOutput, RolloutProgress


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-R"], ["-R", ""]),
        (["-R", "-n", "3"], ["-R", "", "-n", "3"]),
        (["--resume", "outputs/x", "-s"], ["--resume", "outputs/x", "-s"]),
        (["--resume=outputs/x"], ["--resume=outputs/x"]),
        (["--", "-R"], ["--", "-R"]),
        ([], []),
    ],
)
def test_resume_without_a_path(argv: list[str], expected: list[str]) -> None:
    assert with_resume_value(argv) == expected


def test_json_objects() -> None:
    assert json_object(None, "-a") == {}
    assert json_object('{"a": [1]}', "-a") == {"a": [1]}
    for text in ("{", "[1]", "3"):
        with pytest.raises(UsageError, match=r"^-a: "):
            json_object(text, "-a")


def test_a_bad_header_is_refused_without_showing_it() -> None:
    assert headers(["X-A: 1", "X-B:2:3"]) == {"X-A": "1", "X-B": "2:3"}
    with pytest.raises(UsageError) as caught:
        headers(["Bearer sk-secret"])
    assert "sk-secret" not in str(caught.value)


def endpoint(*flags: str | None, keys_here: bool = True) -> tuple[str, str | None]:
    provider, url, key = flags
    config = choose_endpoint(provider, url, key, extra_headers={}, keys_here=keys_here)
    return config.api_base_url, config.api_key_var


def test_a_key_goes_to_its_own_provider_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRIME_API_KEY", "OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert endpoint(None, None, None) == ("https://api.pinference.ai/api/v1", "PRIME_API_KEY")
    assert endpoint("openai", None, None) == ("https://api.openai.com/v1", "OPENAI_API_KEY")
    assert endpoint(None, "http://h:1/v1", None) == ("http://h:1/v1", None)
    assert endpoint(None, "http://h:1/v1", "MY_KEY") == ("http://h:1/v1", "MY_KEY")
    assert endpoint("openai", "http://h:1/v1", None) == ("http://h:1/v1", "OPENAI_API_KEY")
    assert endpoint("vllm", None, None) == ("http://localhost:8000/v1", None)


def test_a_missing_key_is_told_where_it_can_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: at once where it is read here; a server elsewhere has keys of its own."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UsageError, match=r"OPENAI_API_KEY is not set.*--demo-model"):
        endpoint("openai", None, None)
    with pytest.raises(UsageError, match="OPENAI_API_KEY is not set"):
        endpoint(None, "http://h:1/v1", "OPENAI_API_KEY")
    assert endpoint("openai", None, None, keys_here=False)[1] == "OPENAI_API_KEY"
    with pytest.raises(UsageError, match="-b/--api-base-url"):
        endpoint(None, "localhost:8000", None)


def place(**given: Any) -> tuple[str, BusOptions | None]:
    flags = {"address": None, "name": None, "workers": None, "disable_env_server": False, "extra_env_kwargs": {}}
    return choose_mode(**(flags | given))


def test_where_rollouts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place() == ("sidecar", None)
    assert place(disable_env_server=True) == ("here", None)
    monkeypatch.setenv("NATS_URL", "nats://h:1")
    mode, bus = place()
    assert mode == "fleet"
    assert bus is not None
    assert bus.describe() == "nats://h:1"
    assert place(workers=2) == ("sidecar", None)
    assert place(disable_env_server=True) == ("here", None)
    with pytest.raises(UsageError, match=r"-x/--extra-env-kwargs.*NATS_URL"):
        place(extra_env_kwargs={"a": 1})


def test_sampling_flags_yield_to_the_object() -> None:
    assert merge_sampling_args({}, max_tokens=None, temperature=0.0) == {"temperature": 0.0}
    assert merge_sampling_args({"max_tokens": 5}, max_tokens=9, temperature=None) == {"max_tokens": 5}


def test_where_results_go(tmp_path: Any) -> None:
    def path(**given: Any) -> Any:
        return choose_results_path("e", "m", **({"save": False, "resume": None, "output_dir": None} | given))

    assert path() == (None, ())
    assert path(output_dir=str(tmp_path))[0].is_relative_to(tmp_path)
    new, notes = path(resume="", output_dir=str(tmp_path))
    assert "no saved run" in notes[0]
    new.mkdir(parents=True)
    (new / "results.jsonl").touch()
    assert path(resume="", output_dir=str(tmp_path)) == (new, ())
    assert path(resume=str(new / "results.jsonl")) == (new, ())


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (59, "59 s"), (185.2, "3 min 05 s"), (7810, "2 h 10 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def twenty() -> tuple[GenerateMetadata, list[RolloutOutput]]:
    """P16's run: of 20, numbers 7, 9 and 11 failed; and one reward is no number."""
    outputs: list[RolloutOutput] = [
        {"example_id": i // 4, "reward": 1.0 if i % 2 else 0.25, "metrics": {"m": 1.0}, "error": None}
        for i in range(20)
    ]
    for number, error in ((7, RuntimeError("seven")), (9, ServerLostError("nine")), (11, RuntimeError("eleven"))):
        outputs[number] |= {"reward": None, "error": error_info(error)}
    outputs[0]["reward"] = float("nan")
    metadata: GenerateMetadata = {
        "env_id": "e[bold]", "model": "m", "base_url": "http://h", "num_examples": 5, "rollouts_per_example": 4,
        "env_args": {}, "sampling_args": {}, "group_scoring": False, "time_s": 3.0, "path_to_save": "out/x",
        "save_error": None, **summarize(outputs, rollouts_per_example=4),
    }  # fmt: skip
    return metadata, outputs


def text_of(metadata: GenerateMetadata, outputs: list[RolloutOutput]) -> str:
    written = io.StringIO()
    print_summary(Console(file=written, width=120), metadata, outputs, planned=20, abbreviated=True)
    return written.getvalue()


def test_summary_tells_failures_apart_from_rewards() -> None:
    """P16: "3 of 20 failed", with types, one message each, and means without them."""
    text = text_of(*twenty())
    for part in (
        "3 of 20 failed",
        "RuntimeError",
        "RuntimeError('seven')",
        "ServerLostError('nine')",
        "over 16 rollouts",
        "1 reward not finite",
        "ex 0: invalid 1.00 0.25 1.00",
        "ex 1: 0.25 1.00 0.25 failed",
        "results: out/x",
        "e[bold] · m",
    ):
        assert part in text
    assert "eleven" not in text
    assert "interrupted" not in text


def test_summary_of_an_interrupted_run_groups_by_example() -> None:
    _, outputs = twenty()
    some = [outputs[5], outputs[0], outputs[4]]
    metadata = twenty()[0] | summarize(some, rollouts_per_example=4)
    text = text_of(metadata, some)
    assert "3 of 20 rollouts were run" in text
    assert "ex 0: invalid\nex 1: 1.00 0.25\n" in text


def test_summary_as_json_is_strict() -> None:
    summary = json.loads(summary_json(*twenty(), planned=20), parse_constant=pytest.fail)
    assert summary["num_failed"] == 3
    assert summary["rewards"][0] == {"example_id": 0, "rewards": [None, 1.0, 0.25, 1.0]}
    assert {error["type"]: error["count"] for error in summary["errors"]} == {"RuntimeError": 2, "ServerLostError": 1}


def test_plain_display_is_few_lines() -> None:
    written = io.StringIO()
    display = EvalDisplay(Console(file=written, width=200), live=False)
    metadata, outputs = twenty()
    with display:
        display.status("starting")
        display.status("starting")
        display.on_start(20, outputs[:2])
        for output in outputs[2:]:
            display.on_output(output)
        display.on_end(metadata)
    lines = written.getvalue().splitlines()
    assert lines[:2] == ["starting", "20 rollouts to run, 2 kept"]
    assert len(lines) == 3
    assert lines[2].startswith("20/20  reward ")
    assert "failed 3 (RuntimeError 2, ServerLostError 1)" in lines[2]
    assert display.outputs == outputs


def test_errors_are_one_line_unless_they_quote_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("a\nb", code="usage")
    print_error("it said:\n    x\n    y", code="env_crashed")
    assert capsys.readouterr().err == "error[usage]: a b\nerror[env_crashed]: it said:\n    x\n    y\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from envbus.cli.main import app, run_app; run_app(app, ['eval', '--help']);"
        "heavy = {'openai', 'datasets', 'nats', 'pyarrow', 'numpy'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "--demo-model" in done.stdout


def test_the_live_display_shows_the_turns_of_running_rollouts() -> None:
    written = io.StringIO()
    console = Console(file=written, width=200)
    display = EvalDisplay(console, live=True)
    assert display.wants_progress
    display.on_start(8, [])
    for position in range(8):
        for turn in range(1, position + 2):
            data = {"example_id": f"e{position}", "turn": turn}
            display.on_progress(position, RolloutProgress(1, turn, data))
    display.on_progress(3, RolloutProgress(1, 9, {"loss": 1}))
    display.on_progress(7, None)
    console.print(display._render())
    assert "example e6: turn 7, example e5: turn 6, example e4: turn 5" in written.getvalue()
    assert "example e1: turn 2, 1 more" in written.getvalue()
    assert "e7" not in written.getvalue()


def test_plain_lines_ask_for_no_progress() -> None:
    assert not EvalDisplay(Console(file=io.StringIO()), live=False).wants_progress
