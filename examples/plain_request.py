"""One rollout by one plain NATS request: no envbus here, only nats-py and msgpack. See docs/protocol.md.

Start first: nats-server, a model endpoint that the server can reach (python -m envbus.demo_model --port 8000), and
envbus serve reverse-text --address nats://127.0.0.1:4222 --allow-url 'http://127.0.0.1:*'
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgpack
import nats

ADDRESS = os.environ.get("ENVBUS_URL", "nats://127.0.0.1:4222")
MODEL_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
REQUEST = {
    "input": {
        "prompt": [{"role": "user", "content": "Reverse the text: stressed. Answer in <reversed_text> tags."}],
        "answer": "desserts",
        "example_id": 0,
    },
    "client": {"api_base_url": MODEL_URL, "api_key_var": None},
    "model": "demo-model",
}


async def main() -> None:
    connection = await nats.connect(ADDRESS)
    try:
        message = await connection.request("env.reverse-text.rollout", msgpack.packb(REQUEST), timeout=60)
    finally:
        await connection.close()
    reply = msgpack.unpackb(message.data)
    if not reply["ok"]:
        sys.exit(f"{reply['error']['code']}: {reply['error']['message']}")
    output = reply["output"]
    print(output["completion"][-1]["content"], "reward:", output["reward"])


if __name__ == "__main__":
    asyncio.run(main())
