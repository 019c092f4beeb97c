"""GRPO without a GPU: two trainers at once, each with a tiny policy of its own, on two environments of one fleet.

The policy chooses among ways to answer, by a softmax over learned scores; servers reach it as an OpenAI endpoint.
Start servers first, as many as you like, with ENVBUS_URL set, of reverse-text and of guess-number:
envbus serve reverse-text --allow-url 'http://127.0.0.1:*'
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web

from envbus import ClientConfig, NATSEnvClient, RolloutOutput
from envbus.errors import CallError

ADDRESS = os.environ.get("ENVBUS_URL", "nats://127.0.0.1:4222")
ENVS = ("reverse-text", "guess-number")
STEPS, GROUPS_PER_ENV, GROUP_SIZE, LEARNING_RATE = 5, 2, 4, 3.0

# ---- the policy: what it can do in each environment, and how much it likes each


def text_of(messages: list[Any]) -> str:
    return messages[-1]["content"]


def bounds(messages: list[Any]) -> tuple[int, int]:
    """Return what the answers so far leave of the range."""
    low, high = 1, int(re.findall(r"from 1 to (\d+)", messages[0]["content"])[0])
    for guess, answer in zip(messages[1::2], messages[2::2], strict=False):
        number = int(re.findall(r"\d+", guess["content"])[0])
        low, high = (number + 1, high) if "Higher" in answer["content"] else (low, number - 1)
    return low, max(low, high)


# The best way comes last; the policy has to find that out.
WAYS: dict[str, list[Callable[[list[Any]], str]]] = {
    "reversed_text": [
        lambda messages: text_of(messages),
        lambda messages: " ".join(reversed(text_of(messages).split())),
        lambda messages: text_of(messages)[::-1],
    ],
    "guess": [
        lambda messages: str(bounds(messages)[0]),
        lambda messages: str(bounds(messages)[1]),
        lambda messages: str(sum(bounds(messages)) // 2),
    ],
}


class Policy:
    """One score for each way to answer; served as a model, trained with advantages."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scores = {tag: [0.0] * len(ways) for tag, ways in WAYS.items()}

    def chances(self, tag: str) -> list[float]:
        weights = [math.exp(score) for score in self.scores[tag]]
        return [weight / sum(weights) for weight in weights]

    async def complete(self, request: web.Request) -> web.Response:
        """Answer a chat completion; its id says what was chosen, as token ids and logprobs would."""
        messages = (await request.json())["messages"]
        tag = next(tag for tag in WAYS if f"<{tag}>" in str(messages))
        (chosen,) = self.random.choices(range(len(WAYS[tag])), self.chances(tag))
        message = {"role": "assistant", "content": f"<{tag}>{WAYS[tag][chosen](messages)}</{tag}>"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": f"{tag}/{chosen}", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**head, "choices": [choice]})

    def learn(self, group: list[RolloutOutput]) -> None:
        """One policy-gradient step: what did better than its group becomes likelier."""
        spread = statistics.pstdev([output["reward"] or 0.0 for output in group]) or 1.0
        for output in group:
            for turn in output["trajectory"]:
                tag, _, chosen = turn["response"]["id"].partition("/")
                step = LEARNING_RATE * (output["advantage"] or 0.0) / spread / len(output["trajectory"]) / len(group)
                for way, chance in enumerate(self.chances(tag)):
                    self.scores[tag][way] += step * ((way == int(chosen)) - chance)


# ---- the trainer


async def group_of(client: NATSEnvClient, example: Any, endpoint: ClientConfig) -> list[RolloutOutput]:
    try:
        outputs = await client.run_group([example] * GROUP_SIZE, endpoint, "policy")
    except CallError as error:  # a lost server, a time limit: this group is missing, the step goes on
        print(f"a group is missing: {error}")
        return []
    return [output for output in outputs if not output["error"]]  # a failed rollout has no reward to learn from


async def train(seed: int) -> float:
    """Train one policy on all environments; how likely it takes the best ways in the end."""
    policy = Policy(seed)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", policy.complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = ClientConfig(api_base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", api_key_var=None)
    clients = [NATSEnvClient(ADDRESS, env, timeout_s=600) for env in ENVS]
    try:
        sets = [await client.examples() for client in clients]
        means = []
        for _ in range(STEPS):
            jobs = [
                group_of(client, policy.random.choice(examples), endpoint)
                for client, examples in zip(clients, sets, strict=True)
                for _ in range(GROUPS_PER_ENV)
            ]
            groups = await asyncio.gather(*jobs)
            for group in groups:
                policy.learn(group)
            means.append(mean(output["reward"] or 0.0 for group in groups for output in group))
        print(f"trainer {seed}: reward", " ".join(f"{each:.2f}" for each in means), flush=True)
        return mean(policy.chances(tag)[-1] for tag in WAYS)
    finally:
        for client in clients:
            await client.close()
        await runner.cleanup()


def mean(values: Iterable[float]) -> float:
    return statistics.fmean([*values] or [0.0])


def run_trainer(seed: int) -> None:
    sys.exit(0 if asyncio.run(train(seed)) > 1 / 3 else "the policy did not improve")


def main() -> None:
    processes = multiprocessing.get_context("spawn")
    trainers = [processes.Process(target=run_trainer, args=(seed,)) for seed in range(2)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join()
    print(f"{sum(trainer.exitcode == 0 for trainer in trainers)} of {len(trainers)} policies improved")


if __name__ == "__main__":
    main()
