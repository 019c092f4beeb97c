"""Carries out an eval plan: starts what it needs, evaluates, prints the summary, and stops it all."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from envbus.bus.messages import Beat
from envbus.cli import running
from envbus.cli.display import EvalDisplay
from envbus.cli.eval_plan import EvalPlan
from envbus.cli.formats import plural
from envbus.cli.reporting import EXIT_FAILED, EXIT_OK
from envbus.cli.summary import print_summary, summary_json
from envbus.client import NATSEnvClient
from envbus.demo_model import DemoModel
from envbus.errors import CallTimeoutError, EnvbusError, ServerLostError, UsageError
from envbus.logs import setup_logging
from envbus.types import ClientConfig, GenerateMetadata, GenerateOutputs, RolloutOutput

_SLOW_STOP_S = 3.0
Evaluate = Callable[[ClientConfig], Coroutine[Any, Any, GenerateOutputs]]


async def run_plan(plan: EvalPlan) -> int:
    """Run an eval; the exit code."""
    console = Console(stderr=plan.as_json)
    live = console.is_terminal and not console.is_dumb_terminal and not plan.plain
    display = EvalDisplay(console, live=live)
    _route_logs(console, live=live, verbose=plan.verbose)
    running.on_force.append(lambda: console.show_cursor(True))
    places = {"fleet": _fleet, "sidecar": _sidecar, "here": _here}
    with display, _endpoint(plan) as endpoint:
        for note in plan.notes:
            display.on_log(note)
        async with places[plan.mode](plan, display) as evaluate:
            return await _evaluate(plan, display, console, evaluate(endpoint))


async def _evaluate(
    plan: EvalPlan, display: EvalDisplay, console: Console, evaluation: Coroutine[Any, Any, GenerateOutputs]
) -> int:
    try:
        result = await evaluation
    except BaseException:
        display.close()
        if display.metadata is not None:
            _print_summary(plan, console, display.metadata, display.outputs)
        raise
    display.close()
    metadata = result["metadata"]
    _print_summary(plan, console, metadata, result["outputs"])
    complete = metadata["num_rollouts"] == _planned(metadata) and not metadata["num_failed"]
    return EXIT_OK if complete and not metadata["save_error"] else EXIT_FAILED


def _print_summary(plan: EvalPlan, console: Console, metadata: GenerateMetadata, outputs: list[RolloutOutput]) -> None:
    planned = _planned(metadata)
    if plan.as_json:
        print(summary_json(metadata, outputs, planned=planned), flush=True)
    else:
        print_summary(console, metadata, outputs, planned=planned, abbreviated=plan.abbreviated)


def _planned(metadata: GenerateMetadata) -> int:
    return metadata["num_examples"] * metadata["rollouts_per_example"]


@contextmanager
def _endpoint(plan: EvalPlan) -> Iterator[ClientConfig]:
    if not plan.demo_model:
        yield plan.endpoint
        return
    with DemoModel.start() as demo:
        yield plan.endpoint.model_copy(update={"api_base_url": demo.base_url})


def _settings(plan: EvalPlan, display: EvalDisplay) -> dict[str, Any]:
    return {
        "max_concurrent": plan.max_concurrent,
        "results_path": plan.results_path,
        "state_columns": plan.state_columns or None,
        "max_retries": plan.max_retries,
        "rollout_timeout_s": plan.rollout_timeout_s,
        "callbacks": display,
    }


# ---- where rollouts run


@asynccontextmanager
async def _fleet(plan: EvalPlan, display: EvalDisplay) -> AsyncIterator[Evaluate]:
    client = NATSEnvClient(plan.bus, plan.env_id, env_args=plan.env_args, name=plan.name, prefix=plan.prefix)
    async with client:
        watch = asyncio.ensure_future(_tell_absence(client, display))
        try:
            yield _over_bus(plan, display, client)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


@asynccontextmanager
async def _sidecar(plan: EvalPlan, display: EvalDisplay) -> AsyncIterator[Evaluate]:
    from envbus.environments.sidecar import Sidecar

    display.status(f"starting {plural(plan.workers, 'server')} of {plan.env_id}")
    sidecar = await Sidecar.start(
        plan.env_id,
        plan.env_args,
        workers=plan.workers,
        max_concurrent=plan.server_max_concurrent,
        name=plan.name,
        prefix=plan.prefix,
        log_file=plan.results_path / "logs" / "server.log" if plan.results_path else None,
        log_level="DEBUG" if plan.verbose else "INFO",
        env_dir_path=plan.env_dir_path,
        extra_env_kwargs=plan.extra_env_kwargs,
    )
    running.on_force.append(sidecar.kill)
    evaluate = _over_bus(plan, display, sidecar.client)

    async def while_served(endpoint: ClientConfig) -> GenerateOutputs:
        run = asyncio.ensure_future(evaluate(endpoint))
        ended = asyncio.ensure_future(sidecar.all_ended())
        try:
            await asyncio.wait({run, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                raise ServerLostError(sidecar.describe_end())
            return run.result()
        finally:
            for task in (run, ended):
                task.cancel()
            await asyncio.gather(run, ended, return_exceptions=True)

    try:
        yield while_served
    finally:
        await _told_if_slow(sidecar.stop())


@asynccontextmanager
async def _here(plan: EvalPlan, display: EvalDisplay) -> AsyncIterator[Evaluate]:
    from envbus.adapters.hosting import load_hosted
    from envbus.cli.running import keeping_signals
    from envbus.environments import close_clients
    from envbus.environments.loader import add_env_dir, apply_settings
    from envbus.evaluation import generate, repeat_examples

    display.status(f"loading {plan.env_id}")
    add_env_dir(plan.env_dir_path, plan.env_id)
    with keeping_signals():
        env = load_hosted(plan.env_id, plan.env_args)
    apply_settings(env, plan.extra_env_kwargs)
    if plan.independent_scoring and env.requires_group_rollouts:
        raise UsageError(f"env {plan.env_id!r} scores its rollouts in groups: -i/--independent-scoring is not possible")

    async def evaluate(endpoint: ClientConfig) -> GenerateOutputs:
        examples: Any = env.eval_examples()
        count = len(examples) if plan.num_examples < 0 else min(plan.num_examples, len(examples))
        return await generate(
            env,
            repeat_examples([examples[index] for index in range(count)], plan.rollouts_per_example),
            endpoint,
            plan.model,
            plan.sampling_args,
            env_id=plan.env_id,
            env_args=plan.env_args,
            rollouts_per_example=plan.rollouts_per_example,
            group_scoring=bool(env.requires_group_rollouts),
            **_settings(plan, display),
        )

    try:
        yield evaluate
    finally:
        await env.close()
        await close_clients()


async def _told_if_slow(stopping: Coroutine[Any, Any, None]) -> None:
    """Stop, and say that it takes a while if it does; a cancel goes through."""
    task = asyncio.ensure_future(stopping)
    try:
        done, _ = await asyncio.wait({task}, timeout=_SLOW_STOP_S)
        if not done:
            print(
                "stopping the servers: their teardown hooks run; Ctrl-C ends this at once", file=sys.stderr, flush=True
            )
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _over_bus(plan: EvalPlan, display: EvalDisplay, client: NATSEnvClient) -> Evaluate:
    async def evaluate(endpoint: ClientConfig) -> GenerateOutputs:
        try:
            return await client.evaluate(
                endpoint,
                plan.model,
                plan.sampling_args,
                plan.num_examples,
                plan.rollouts_per_example,
                independent_scoring=plan.independent_scoring,
                **_settings(plan, display),
            )
        except TimeoutError as error:
            raise CallTimeoutError(
                f"a server of env {client.env!r} gave no answer in time; it has stopped, or is overloaded: try again"
            ) from error

    return evaluate


# ---- what a waiting run says, and where logs go


async def _tell_absence(client: NATSEnvClient, display: EvalDisplay) -> None:
    """Until the first rollout has ended, say why nothing happens yet."""
    was_there = False
    while not display.outputs:
        if client.is_connected:
            reconnects = client.stats()["reconnects"]
            with suppress(EnvbusError, TimeoutError):
                servers = await client.servers()
                was_there |= bool(servers)
                # An outage while it listened: what was not heard is not known to be away.
                if client.is_connected and client.stats()["reconnects"] == reconnects:
                    display.status(absence_text(client.env, servers, was_there=was_there))
        else:
            display.status("waiting for NATS: the connection is lost, and is made again as soon as it is there")
        await asyncio.sleep(0.5)
    display.status("")


def absence_text(env: str, servers: Sequence[Beat], *, was_there: bool) -> str:
    """Say why no rollout of a run has ended yet; empty if its servers work.

    Args:
        env: Whose servers.
        servers: Their latest heartbeats.
        was_there: Whether one was heard before.
    """
    states = [server.state for server in servers]
    if not states and was_there:
        return f"no server of env {env!r} is heard any more; waiting a while for one to come back"
    if not states:
        return f"no server of env {env!r} is there yet; waiting a while for one"
    if all(state == "loading" for state in states):
        return f"the servers of env {env!r} are still loading"
    if all(state in ("draining", "stopping") for state in states):
        return f"the servers of env {env!r} are stopping; waiting a while for others"
    if all(state in ("full", "draining", "stopping") for state in states):
        who = f"the server of env {env!r} is" if len(states) == 1 else f"all {len(states):,} servers of env {env!r} are"
        if all(server.short_of_memory for server in servers):
            return (
                f"{who} full (memory): results wait to be collected by their clients, or inputs are large; "
                "this run waits in line; see ENVBUS_SERVER_HOLD_RESULTS_BYTES and ENVBUS_SERVER_HOLD_INPUTS_BYTES"
            )
        return f"{who} full; this run waits in line"
    return ""


def _route_logs(console: Console, *, live: bool, verbose: bool) -> None:
    level = "DEBUG" if verbose else "WARNING"
    setup_logging(level, console=not live)
    if live:
        handler = RichHandler(console=console, show_path=False, markup=False)
        logging.getLogger("envbus").addHandler(handler)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
