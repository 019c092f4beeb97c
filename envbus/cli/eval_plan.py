"""What an eval is going to do: checked settings, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envbus.bus.address import BusOptions, find_bus_options
from envbus.cli.arguments import LATEST_RUN
from envbus.errors import UsageError
from envbus.types import ClientConfig, SamplingArgs

Mode = Literal["fleet", "sidecar", "here"]
"""Servers at a NATS address, servers of our own, or in this process."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The settings of one run."""

    env_id: str
    env_args: dict[str, Any]
    env_dir_path: str
    extra_env_kwargs: dict[str, Any]
    mode: Mode
    bus: BusOptions | None
    name: str | None
    prefix: str
    workers: int
    server_max_concurrent: int | None
    endpoint: ClientConfig
    demo_model: bool
    """The endpoint is the demo model, which is started with the run."""
    model: str
    sampling_args: SamplingArgs
    num_examples: int
    rollouts_per_example: int
    max_concurrent: int
    rollout_timeout_s: float | None
    max_retries: int
    state_columns: list[str]
    independent_scoring: bool
    results_path: Path | None
    notes: tuple[str, ...]
    """Worth telling when the run begins."""
    plain: bool
    as_json: bool
    abbreviated: bool
    verbose: bool


def choose_mode(
    *,
    address: str | None,
    context: str | None = None,
    name: str | None,
    workers: int | None,
    disable_env_server: bool,
    extra_env_kwargs: dict[str, Any],
) -> tuple[Mode, BusOptions | None]:
    """Where rollouts run. A flag beats an address from the environment.

    Raises:
        UsageError: Flags that contradict each other, or the address is wrong.
    """
    where = "--address" if address else "--context"
    clashes = (
        (where, address or context, "--disable-env-server", disable_env_server),
        (where, address or context, "-w/--workers", workers),
        (where, address or context, "-x/--extra-env-kwargs", extra_env_kwargs),
        ("--disable-env-server", disable_env_server, "-w/--workers", workers),
        ("--disable-env-server", disable_env_server, "--name", name),
    )
    for first, first_given, second, second_given in clashes:
        if first_given and second_given:
            raise UsageError(f"{first} and {second} contradict each other; give only one")
    if disable_env_server:
        return "here", None
    if workers is not None:
        if workers < 1:
            raise UsageError("-w/--workers must be at least 1")
        return "sidecar", None
    bus = find_bus_options(address, context=context)
    if bus is not None and extra_env_kwargs:
        raise UsageError(
            "-x/--extra-env-kwargs does not reach the servers at the address in ENVBUS_URL, NATS_URL or "
            "ENVBUS_CONTEXT; unset that, or leave -x out"
        )
    return ("fleet", bus) if bus is not None else ("sidecar", None)


def merge_sampling_args(given: dict[str, Any], *, max_tokens: int | None, temperature: float | None) -> SamplingArgs:
    """Sampling arguments; those of ``-S`` win over ``-t`` and ``-T``."""
    flags = {"max_tokens": max_tokens, "temperature": temperature}
    return {name: value for name, value in flags.items() if value is not None} | given


def choose_results_path(
    env_id: str, model: str, *, save: bool, resume: str | None, output_dir: str | None
) -> tuple[Path | None, tuple[str, ...]]:
    """Where results go, and notes about it.

    Raises:
        UsageError: The run to resume is not there.
    """
    from envbus.evaluation.run_paths import (
        DEFAULT_ROOT,
        RESULTS_FILE,
        default_results_path,
        find_latest_run,
        run_folder,
    )

    root = Path(output_dir) if output_dir else DEFAULT_ROOT
    if resume:
        folder = run_folder(resume)
        if not (folder / RESULTS_FILE).is_file():
            raise UsageError(f"--resume: there is no {RESULTS_FILE} in {folder}")
        return folder, ()
    if resume == LATEST_RUN:
        latest = find_latest_run(env_id, model, root)
        if latest is not None:
            return latest, ()
        note = f"no saved run of {env_id} with {model} below {root}; this is a new one"
        return default_results_path(env_id, model, root), (note,)
    if save or output_dir:
        return default_results_path(env_id, model, root), ()
    return None, ()
