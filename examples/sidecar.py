"""Run an environment's rollouts in a server process of its own: its code cannot block this one."""

from __future__ import annotations

import asyncio

from envbus import ClientConfig, DemoModel, load_environment


async def main() -> None:
    env = load_environment("guess-number")
    with DemoModel.start() as demo:
        client = ClientConfig(api_base_url=demo.base_url, api_key_var=None)
        await env.start_server()  # with an address: on that bus, else on one of its own
        try:
            results = await env.evaluate(client, demo.model, num_examples=3, rollouts_per_example=4)
        finally:
            await env.close()  # stops the server too
    metadata = results["metadata"]
    print(f"{metadata['num_rollouts']} rollouts, reward {metadata['avg_reward']:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
