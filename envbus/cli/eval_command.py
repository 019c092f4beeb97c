"""``envbus eval`` and ``vf-eval``: the flags, and what they add up to."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from envbus.cli.arguments import MAX_SECONDS

_MODEL, _RUN, _WHERE, _OUTPUT = "Model", "Run", "Where rollouts run", "Output"


def evaluate(
    env_id: Annotated[str, typer.Argument(help="Name of the environment, e.g. reverse-text.")],
    env_args: Annotated[
        str | None,
        typer.Option(
            "-a", "--env-args", metavar="JSON", help="Arguments of its load_environment.", rich_help_panel=_RUN
        ),
    ] = None,
    num_examples: Annotated[
        int, typer.Option("-n", "--num-examples", min=-1, help="Examples; -1 for all.", rich_help_panel=_RUN)
    ] = 5,
    rollouts_per_example: Annotated[
        int, typer.Option("-r", "--rollouts-per-example", min=1, help="Rollouts of each.", rich_help_panel=_RUN)
    ] = 3,
    max_concurrent: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--max-concurrent",
            min=-1,
            help="Rollouts at the same time; -1 for as many as the servers take. Default: 32.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            max=MAX_SECONDS,
            metavar="SECONDS",
            help="Limit for each rollout. Default: none.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    max_retries: Annotated[
        int,
        typer.Option(
            "--max-retries",
            min=0,
            help="Further tries of rollouts that fail for a passing reason.",
            rich_help_panel=_RUN,
        ),
    ] = 0,
    independent_scoring: Annotated[
        bool,
        typer.Option(
            "-i", "--independent-scoring", help="Score rollouts one by one, not in groups.", rich_help_panel=_RUN
        ),
    ] = False,
    extra_env_kwargs: Annotated[
        str | None,
        typer.Option(
            "-x", "--extra-env-kwargs", metavar="JSON", help="Settings of the loaded environment.", rich_help_panel=_RUN
        ),
    ] = None,
    env_dir_path: Annotated[
        str, typer.Option("--env-dir-path", help="Environments are also looked for here.", rich_help_panel=_RUN)
    ] = "./environments",
    demo_model: Annotated[
        bool,
        typer.Option("--demo-model", help="Use a built-in stub model: no key, no network.", rich_help_panel=_MODEL),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="Model name. Default: openai/gpt-4.1-mini.", rich_help_panel=_MODEL),
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--provider",
            help="prime (default), openai, openrouter, anthropic, deepseek, minimax, glm, local or vllm: "
            "stands for -b and -k.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    api_base_url: Annotated[
        str | None,
        typer.Option("-b", "--api-base-url", metavar="URL", help="OpenAI-compatible endpoint.", rich_help_panel=_MODEL),
    ] = None,
    api_key_var: Annotated[
        str | None,
        typer.Option(
            "-k", "--api-key-var", metavar="VAR", help="Environment variable with its API key.", rich_help_panel=_MODEL
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header", metavar="'NAME: VALUE'", help="Extra HTTP header. Repeatable.", rich_help_panel=_MODEL
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("-t", "--max-tokens", help="Most tokens per answer.", rich_help_panel=_MODEL)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("-T", "--temperature", min=0, max=100, help="Sampling temperature.", rich_help_panel=_MODEL),
    ] = None,
    sampling_args: Annotated[
        str | None,
        typer.Option(
            "-S",
            "--sampling-args",
            metavar="JSON",
            help="Further sampling arguments; win over -t, -T.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="URL",
            help="NATS address: use the servers that are there. Default: ENVBUS_URL or NATS_URL if set, else "
            "server processes are started for this run.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="CONTEXT",
            help="NATS CLI context with address and credentials: the path of its .json file, or its name.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "-w", "--workers", "--num-workers", help="Server processes to start. Default: 1.", rich_help_panel=_WHERE
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The env's name on the bus, if its servers have one.", rich_help_panel=_WHERE),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="First token of all NATS subjects.", rich_help_panel=_WHERE)
    ] = "env",
    disable_env_server: Annotated[
        bool,
        typer.Option("--disable-env-server", help="Run in this process, without a bus.", rich_help_panel=_WHERE),
    ] = False,
    save_results: Annotated[
        bool,
        typer.Option(
            "-s", "--save-results", help="Save below outputs/evals as results come in.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    output_dir: Annotated[
        str | None,
        typer.Option(
            "-o", "--output-dir", metavar="DIR", help="Save below this folder instead.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "-R",
            "--resume",
            metavar="[PATH]",
            help="Go on with a saved run, by default the latest: only missing and failed rollouts are run.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    state_columns: Annotated[
        str | None,
        typer.Option(
            "-C", "--state-columns", metavar="A,B", help="Further state fields to save.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    abbreviated_summary: Annotated[
        bool,
        typer.Option("-A", "--abbreviated-summary", help="No example in the summary.", rich_help_panel=_OUTPUT),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.", rich_help_panel=_OUTPUT)
    ] = False,
    disable_tui: Annotated[
        bool,
        typer.Option("-d", "--disable-tui", help="Plain lines instead of the live display.", rich_help_panel=_OUTPUT),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show logs and tracebacks.", rich_help_panel=_OUTPUT)
    ] = False,
) -> int:
    """Evaluate a model on an environment.

    Try it without a key or network: envbus eval reverse-text -n 5 -r 3 --demo-model

    Exit code: 0 all fine, 1 some rollouts failed, 2 wrong usage, 130 interrupted.
    """
    from envbus.cli.arguments import headers, json_object
    from envbus.cli.eval_plan import EvalPlan, choose_mode, choose_results_path, merge_sampling_args
    from envbus.cli.eval_run import run_plan
    from envbus.cli.providers import DEFAULT_MODEL, choose_endpoint
    from envbus.cli.running import run
    from envbus.errors import UsageError
    from envbus.types import ClientConfig

    extra = json_object(extra_env_kwargs, "-x/--extra-env-kwargs")
    args = json_object(env_args, "-a/--env-args")
    sampling = merge_sampling_args(
        json_object(sampling_args, "-S/--sampling-args"), max_tokens=max_tokens, temperature=temperature
    )
    mode, bus = choose_mode(
        address=address,
        context=context,
        name=name,
        workers=workers,
        disable_env_server=disable_env_server,
        extra_env_kwargs=extra,
    )
    flags = {"-p/--provider": provider, "-b/--api-base-url": api_base_url, "-k/--api-key-var": api_key_var}
    for flag, value in flags.items():
        if demo_model and value:
            raise UsageError(f"--demo-model and {flag} contradict each other; give only one")
    model_name = model or ("demo-model" if demo_model else DEFAULT_MODEL)
    results_path, notes = choose_results_path(
        env_id, model_name, save=save_results, resume=resume, output_dir=output_dir
    )
    extra_headers = headers(header or ())
    endpoint = ClientConfig(api_key_var=None, extra_headers=extra_headers)
    if not demo_model:
        endpoint = choose_endpoint(
            provider, api_base_url, api_key_var, extra_headers=extra_headers, keys_here=mode != "fleet"
        )
    plan = EvalPlan(
        env_id=env_id,
        env_args=args,
        env_dir_path=env_dir_path,
        extra_env_kwargs=extra,
        mode=mode,
        bus=bus,
        name=name,
        prefix=prefix,
        workers=workers or 1,
        server_max_concurrent=math.ceil(max_concurrent / (workers or 1))
        if max_concurrent and max_concurrent > 0
        else None,
        endpoint=endpoint,
        demo_model=demo_model,
        model=model_name,
        sampling_args=sampling,
        num_examples=num_examples,
        rollouts_per_example=rollouts_per_example,
        max_concurrent=32 if max_concurrent is None else max_concurrent,
        rollout_timeout_s=timeout,
        max_retries=max_retries,
        state_columns=[column.strip() for column in (state_columns or "").split(",") if column.strip()],
        independent_scoring=independent_scoring,
        results_path=results_path,
        notes=notes,
        plain=disable_tui,
        as_json=as_json,
        abbreviated=abbreviated_summary,
        verbose=verbose,
    )
    return run(lambda: run_plan(plan), verbose=verbose)
