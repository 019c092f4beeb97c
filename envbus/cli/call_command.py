"""``envbus call``: one rollout, with its messages and reward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from envbus.cli.operator_options import Address, AsJson, Context, Prefix, Timeout, print_json

if TYPE_CHECKING:
    from envbus.client import NATSEnvClient
    from envbus.types import ClientConfig, RolloutInput, RolloutOutput

TIMEOUT_S = 600.0


def call(
    env: Annotated[str, typer.Argument(help="Name of the env on the bus.")],
    index: Annotated[int, typer.Option("-i", "--index", min=0, help="Which example of the eval set.")] = 0,
    given: Annotated[
        str | None,
        typer.Option("--input", metavar="JSON", help='An input of your own instead: {"prompt": [...], "answer": ...}.'),
    ] = None,
    demo_model: Annotated[
        bool, typer.Option("--demo-model", help="Use a built-in stub model; the server must be on this host.")
    ] = False,
    model: Annotated[str | None, typer.Option("-m", "--model", help="Model name.")] = None,
    provider: Annotated[
        str | None, typer.Option("-p", "--provider", help="Stands for -b and -k; see envbus eval --help.")
    ] = None,
    api_base_url: Annotated[
        str | None, typer.Option("-b", "--api-base-url", metavar="URL", help="OpenAI-compatible endpoint.")
    ] = None,
    api_key_var: Annotated[
        str | None,
        typer.Option("-k", "--api-key-var", metavar="VAR", help="Variable with its API key, on the server's host."),
    ] = None,
    sampling_args: Annotated[
        str | None, typer.Option("-S", "--sampling-args", metavar="JSON", help="Sampling arguments.")
    ] = None,
    timeout: Timeout = TIMEOUT_S,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Run one rollout and show its messages and reward.

    Exit code: 0 fine, 1 the rollout failed.
    """
    from envbus.cli.arguments import json_object
    from envbus.cli.providers import DEFAULT_MODEL, choose_endpoint
    from envbus.cli.running import run
    from envbus.errors import UsageError
    from envbus.types import ClientConfig

    for flag, value in {
        "-p/--provider": provider,
        "-b/--api-base-url": api_base_url,
        "-k/--api-key-var": api_key_var,
    }.items():
        if demo_model and value:
            raise UsageError(f"--demo-model and {flag} contradict each other; give only one")
    own_input = json_object(given, "--input")
    sampling = json_object(sampling_args, "-S/--sampling-args")
    endpoint = ClientConfig(api_key_var=None)
    if not demo_model:
        endpoint = choose_endpoint(provider, api_base_url, api_key_var, extra_headers={}, keys_here=False)

    async def work() -> int:
        from envbus.bus.address import resolve_bus_options
        from envbus.client import NATSEnvClient
        from envbus.logs import setup_logging

        setup_logging("ERROR")
        with _model_at(endpoint, demo_model) as reachable:
            options = resolve_bus_options(address, context=context)
            async with NATSEnvClient(options, name=env, prefix=prefix, timeout_s=timeout or None) as client:
                await client.wait_for_server()
                row = cast("RolloutInput", own_input) if own_input else await _example(client, index)
                row.setdefault("example_id", 0)
                name = model or ("demo-model" if demo_model else DEFAULT_MODEL)
                output = await client.run_rollout(row, reachable, name, sampling or None)
        _show(output, as_json)
        return 1 if output.get("error") else 0

    return run(work, verbose=False)


@contextlib.contextmanager
def _model_at(endpoint: ClientConfig, demo_model: bool) -> Iterator[ClientConfig]:
    if not demo_model:
        yield endpoint
        return
    from envbus.demo_model import DemoModel

    with DemoModel.start() as demo:
        yield endpoint.model_copy(update={"api_base_url": demo.base_url})


async def _example(client: NATSEnvClient, index: int) -> RolloutInput:
    from envbus.errors import UsageError

    rows = await client.examples(index + 1)
    if index >= len(rows):
        raise UsageError(f"-i/--index {index}: env {client.env!r} has {len(rows)} examples, counted from 0")
    return rows[index]


def _show(output: RolloutOutput, as_json: bool) -> None:
    if as_json:
        print_json(output)
        return
    from rich.text import Text

    from envbus.cli.fleet_tables import output_console
    from envbus.cli.formats import duration, number

    console = output_console()
    for message in [*(output.get("prompt") or []), *(output.get("completion") or [])]:
        console.print(
            Text(f"{message.get('role', '?')}: ", style="bold"), Text(_content(message)), sep="", soft_wrap=True
        )
    timing: Any = output.get("timing") or {}
    if error := output.get("error"):
        console.print(Text(f"failed: {error.get('error_chain_repr', error['error'])}", style="red"), soft_wrap=True)
    else:
        console.print(Text(f"reward: {number(output.get('reward'))}", style="bold"))
    for name, value in (output.get("metrics") or {}).items():
        console.print(Text(f"{name}: {number(value)}", style="dim"))
    if isinstance(total_s := timing.get("total_s"), int | float):
        console.print(Text(f"time: {duration(total_s)}", style="dim"))


def _content(message: dict[str, Any]) -> str:
    from envbus.evaluation.strict_json import dumps

    content = message.get("content") or ""
    text = content if isinstance(content, str) else dumps(content)
    calls = [each.get("function", each) for each in message.get("tool_calls") or []]
    text += "".join(f"\n  → {each.get('name')}({each.get('arguments')})" for each in calls)
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
