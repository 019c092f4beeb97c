"""What bounds a call and what does not: long rollouts, limits of concurrency, settings that would set nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_process import Cli, wait_for_line
from pydantic import ValidationError
from stage import Stage

from envbus import ClientSettings, NATSEnvClient, ServerSettings

ENVS = Path(__file__).parent / "envs"
SHORT = {
    "accept_timeout_s": 0.5,
    "wait_repeat_s": 0.3,
    "check_interval_s": 0.2,
    "stall_timeout_s": 3.0,
    "no_server_timeout_s": 0.5,
    "loading_timeout_s": 0.5,
    "start_window_s": 3.0,
    "close_timeout_s": 0.5,
}
LONGER_S = 4.0
"""Than every one of these, and than the 0.5 s that a NATS client waits for a reply by default."""


async def test_no_limit_of_the_bus_cuts_a_rollout(cli: Cli, nats_url: str, prefix: str) -> None:
    """P22: without a timeout of their own run_rollout, run_group and vf-eval wait for as long as it takes."""
    notes = cli.folder / "notes.txt"
    arguments = json.dumps({"delay_s": LONGER_S, "notes": str(notes)})
    where = ("--address", nats_url, "--prefix", prefix, "--name", "case")
    server = cli.start("serve", "case-env", *where, "--env-dir-path", str(ENVS), "-a", arguments)
    wait_for_line(server, "is ready", stream="stderr")
    variables = {f"ENVBUS_CLIENT_{name.upper()}": str(value) for name, value in SHORT.items()}
    item: Any = {"prompt": [], "example_id": 1}
    async with NATSEnvClient(nats_url, name="case", prefix=prefix, settings=ClientSettings(**SHORT)) as client:
        single, group, evaluated = await asyncio.gather(
            client.run_rollout(item, None, "m"),
            client.run_group([item, item], None, "m"),
            asyncio.to_thread(
                cli.run,
                "eval",
                "case-env",
                *where,
                "-n",
                "2",
                "-r",
                "1",
                "--demo-model",
                "--json",
                variables=variables,
                timeout_s=100,
            ),
        )
    assert [output["reward"] for output in [single, *group]] == [1.0] * 3
    assert evaluated.code == 0, evaluated.err
    assert json.loads(evaluated.out)["num_failed"] == 0
    assert notes.read_text().count("start") == 5, "none was sent again"
    server.terminate()
    server.communicate(timeout=20)


async def test_the_limit_of_an_evaluation_counts_the_members_of_groups(stage: Stage) -> None:
    """P52: 4 groups of 4 on two servers that would take 16, under a limit of 4."""
    for _ in range(2):
        stage.launch(max_concurrent=8, env_args={"groups": True})
    await stage.ready()
    # Not accepted in time, a group would be sent again, and start twice until the second copy is stopped.
    async with stage.client(settings={"accept_timeout_s": 30.0}) as client:
        result = await client.evaluate(None, "m", num_examples=4, rollouts_per_example=4, max_concurrent=4)
    assert len(result["outputs"]) == 16
    running = peak = 0
    for entry in sorted(stage.events(), key=lambda entry: entry.get("at", 0)):
        running += {"start": 1, "end": -1, "cancelled": -1}.get(entry["event"], 0)
        peak = max(peak, running)
    assert peak == 4


@pytest.mark.parametrize(
    ("settings", "variable", "hint"),
    [
        (ServerSettings, "ENVBUS_SERVER_MAX_CONCURRENT", "no setting ENVBUS_SERVER_MAX_CONCURRENT"),
        (ServerSettings, "ENVBUS_SERVER_GRACE", "did you mean ENVBUS_SERVER_GRACE_S"),
        (ClientSettings, "ENVBUS_CLIENT_MAX_ATEMPTS", "did you mean ENVBUS_CLIENT_MAX_ATTEMPTS"),
        (ClientSettings, "ENVBUS_CLINET_MAX_ATTEMPTS", "did you mean ENVBUS_CLIENT_MAX_ATTEMPTS"),
        (ServerSettings, "ENVBUS_SEVER_GRACE_S", "did you mean ENVBUS_SERVER_GRACE_S"),
    ],
)
def test_a_limit_that_does_not_exist_is_an_error(
    settings: Any, variable: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P52: accepted and not applied would be worse."""
    monkeypatch.setenv(variable, "5")
    with pytest.raises(ValidationError, match=hint):
        settings()


def test_variables_that_kubernetes_makes_for_a_service_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_NATS", "PORT", "PORT_4222_TCP", "PORT_4222_TCP_ADDR"):
        monkeypatch.setenv(f"ENVBUS_SERVER_{name}", "x")
    assert ServerSettings().grace_s == 30
