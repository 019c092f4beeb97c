"""Two server processes started by hand, and a client that uses both. Needs a NATS server."""

from __future__ import annotations

import asyncio
import multiprocessing
import os

from envbus import ClientConfig, DemoModel, NATSEnvClient, NATSEnvServer

ADDRESS = os.environ.get("ENVBUS_URL", "nats://127.0.0.1:4222")
ENV_ID = "reverse-text"


async def evaluate() -> None:
    with DemoModel.start() as demo:
        async with NATSEnvClient(ADDRESS, ENV_ID) as client:
            await client.wait_for_server()
            endpoint = ClientConfig(api_base_url=demo.base_url, api_key_var=None)
            results = await client.evaluate(endpoint, demo.model, num_examples=5, rollouts_per_example=3)
    metadata = results["metadata"]
    print(f"{metadata['num_rollouts']} rollouts, reward {metadata['avg_reward']:.2f}")


def main() -> None:
    processes = multiprocessing.get_context("spawn")
    servers = [
        processes.Process(
            target=NATSEnvServer.run_server,
            args=(ENV_ID,),
            kwargs={
                "address": ADDRESS,
                "allow_urls": ["http://127.0.0.1:*"],
                "max_concurrent": 8,
                "log_level": "WARNING",
            },
        )
        for _ in range(2)
    ]
    for server in servers:
        server.start()
    try:
        asyncio.run(evaluate())
    finally:
        for server in servers:
            server.terminate()  # a server drains and runs its teardown hooks on SIGTERM
        for server in servers:
            server.join()


if __name__ == "__main__":
    main()
