"""A trainer's loop: groups of rollouts from the servers on the bus, in flight while earlier ones are used.

Start servers first, as many as you like:
envbus serve reverse-text --address nats://127.0.0.1:4222 --allow-url 'http://127.0.0.1:*'
"""

from __future__ import annotations

import asyncio
import os

from envbus import ClientConfig, DemoModel, NATSEnvClient, RolloutOutput
from envbus.errors import CallError

ADDRESS = os.environ.get("ENVBUS_URL", "nats://127.0.0.1:4222")
GROUP_SIZE = 4
STEPS = 3
GROUPS_PER_STEP = 5


def update(groups: list[list[RolloutOutput]]) -> None:
    """Stands for the gradient step. A failed rollout has an error and no reward: leave it out."""
    good = [output for group in groups for output in group if not output["error"]]
    mean = sum(output["reward"] or 0.0 for output in good) / max(1, len(good))
    spread = max((abs(output["advantage"] or 0.0) for output in good), default=0.0)
    print(f"{len(good)} rollouts, reward {mean:.2f}, largest advantage {spread:.2f}")


async def main() -> None:
    with DemoModel.start() as demo:  # in earnest: your inference server
        endpoint = ClientConfig(api_base_url=demo.base_url, api_key_var=None)
        async with NATSEnvClient(ADDRESS, "reverse-text", timeout_s=600) as client:
            await client.wait_for_server()
            examples = await client.examples(STEPS * GROUPS_PER_STEP)

            async def group(position: int) -> list[RolloutOutput]:
                inputs = [examples[position]] * GROUP_SIZE
                try:
                    return await client.run_group(inputs, endpoint, demo.model, {"temperature": 1.0})
                except CallError as error:  # a lost server, a time limit: this group is missing, the step goes on
                    print(f"group {position}: {error}")
                    return []

            for step in range(STEPS):
                positions = range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP)
                update(await asyncio.gather(*(group(position) for position in positions)))


if __name__ == "__main__":
    asyncio.run(main())
