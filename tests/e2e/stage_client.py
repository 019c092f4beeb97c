"""A client process of an end-to-end test: makes the calls in its argument, prints how each ended."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from envbus import ClientSettings, NATSEnvClient
from envbus.errors import EnvbusError


async def main(spec: dict[str, Any]) -> None:
    settings = ClientSettings(**spec["settings"])
    async with NATSEnvClient(spec["url"], name=spec["name"], prefix=spec["prefix"], settings=settings) as client:
        outcomes = await asyncio.gather(*(outcome(client, item) for item in spec["items"]))
    print(json.dumps(outcomes))


async def outcome(client: NATSEnvClient, item: Any) -> str:
    try:
        await client.run_rollout(item, None, "m")
    except EnvbusError as error:
        return type(error).__name__
    return "result"


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
