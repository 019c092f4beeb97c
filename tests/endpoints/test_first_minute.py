"""What works with no word about URLs: servers of a bus that is this host's own. What such servers still refuse."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_endpoint import BadEndpoint, answer, completion
from served import ENV_ID, ITEM, READY_S

from envbus import NATSEnvClient
from envbus.bus.lifeline import kill_group
from envbus.types import ClientConfig

RIGHT = answer(completion("<reversed_text>cba</reversed_text>"))


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[str]:
    """The address of the NATS server that a command starts for itself."""
    out = folder / "out.txt"
    with out.open("wb") as file:
        command = [sys.executable, "-P", "-m", "envbus", *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder, start_new_session=True)
    try:
        deadline = time.monotonic() + READY_S
        while not (told := re.search(r"NATS is at (\S+);", out.read_text())):
            assert time.monotonic() < deadline, out.read_text()
            time.sleep(0.05)
        yield told[1]
    finally:
        kill_group(process.pid)
        process.wait(10)


@pytest.mark.parametrize("arguments", [("serve", ENV_ID, "--embedded"), ("up", ENV_ID)])
async def test_a_server_with_a_bus_of_its_own_calls_this_hosts_models(
    arguments: tuple[str, ...], tmp_path: Path, endpoint: BadEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key, and on loopback only."""
    monkeypatch.setenv("MY_LLM_KEY", "sk-not-allowed-here")
    endpoint.will(RIGHT)
    with started(tmp_path, *arguments) as address:
        async with NATSEnvClient(address, ENV_ID) as client:
            await client.wait_for_server(timeout_s=READY_S)
            await ask(client, endpoint)


async def ask(client: NATSEnvClient, endpoint: BadEndpoint) -> None:
    assert (await client.run_rollout(ITEM, endpoint.config(), "m"))["error"] is None
    for refused, kind in (
        (ClientConfig(api_base_url="http://10.255.255.1/v1", api_key_var=None), "ModelAddressError"),
        (endpoint.config(api_key_var="MY_LLM_KEY"), "ModelKeyError"),
    ):
        output = await client.run_rollout(ITEM, refused, "m")
        assert output["error"] is not None
        assert output["error"]["error"] == kind
    assert len(endpoint.requests) == 1
