"""Model calls of hosted environments of verifiers 0.1.x: ours, so no key comes back and no call adds a credential."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from classic_life import ENV, TURNS, row
from fleet import READY_S, Fleet, endpoint

from envbus.adapters.verifiers.client_configs import client_config
from envbus.errors import UsageError

sys.path.append(str(Path(__file__).parent.parent / "endpoints"))
from bad_endpoint import BadEndpoint, answer, completion, error

KEY = "sk-canary/4f+9b1c-DO-NOT-LEAK"


@pytest.fixture
def stub() -> Iterator[BadEndpoint]:
    made = BadEndpoint()
    made.open()
    yield made
    made.close()


async def test_an_endpoint_that_echoes_the_key(fleet: Fleet, stub: BadEndpoint) -> None:
    """P47: neither outputs nor the server's log hold it."""
    server = fleet.serve(ENV, TURNS, "--allow-key", f"KEY=http://127.0.0.1:{stub.port}", KEY=KEY)
    here = endpoint(stub.url, api_key_var="KEY", max_retries=0)
    async with fleet.client(ENV, TURNS) as client:
        await client.wait_for_server(timeout_s=READY_S)
        for act in (error(401, f"Incorrect API key provided: {KEY}"), answer(completion(f"you said {KEY}"))):
            stub.will(act)
            output = await client.run_rollout(row(), here, "m", state_columns=["trajectory"])
            assert "[redacted]" in str(output)
            assert KEY not in str(output)
        asked = len(stub.requests)
        headers = {"extra_headers": {"X-Api-Key": "of-the-client"}}
        refused = await client.run_rollout(row(), here, "m", headers)
        assert refused["error"] is not None, "the library names headers of its own, and takes no others"
        assert "of-the-client" not in str(refused["error"])
        assert len(stub.requests) == asked
    assert stub.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    assert KEY not in server.log


def test_a_config_that_is_refused_is_not_repeated() -> None:
    for fields in ({"api_base_url": "http://user:pass-word@x/v1"}, {"extra_headers": {"Cookie": "pass-word"}}):
        with pytest.raises(UsageError, match="cannot cross the bus") as refused:
            client_config(fields, [])
        assert "pass-word" not in str(refused.value)
