"""Arguments that fit on no message are refused at once: later they would hold up every call of the client."""

from __future__ import annotations

from typing import Any

import pytest

from envbus import NATSEnvClient
from envbus.bus.calls import MAX_GROUP
from envbus.errors import UsageError

NOWHERE = "nats://127.0.0.1:1"


async def test_a_group_that_no_server_takes() -> None:
    item: Any = {"prompt": [], "example_id": 1}
    client = NATSEnvClient(NOWHERE, "env")
    with pytest.raises(UsageError, match="at most 100,000 inputs, not 100,001"):
        await client.run_group([item] * (MAX_GROUP + 1), None, "m")


def test_a_priority_that_is_too_long() -> None:
    with pytest.raises(UsageError, match="64 bits"):
        NATSEnvClient(NOWHERE, "env", priority=2**70)
