"""Sidecar: server processes of one environment that belong to the process that started them.

Owns the processes, a bus when it was given no address, and the client. None of them
outlives this process, and one that ends while it loads ends the wait at once.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from envbus.bus.embedded import EmbeddedNats
from envbus.bus.lifeline import Lifeline
from envbus.bus.subjects import DEFAULT_PREFIX, Subjects, env_name
from envbus.client import NATSEnvClient
from envbus.environments.server_process import ServerProcess, own_import_paths
from envbus.errors import EnvironmentCrashedError, UsageError

URL_VAR = "ENVBUS_URL"
ENV_ARGS_VAR = "ENVBUS_SERVE_ENV_ARGS"
EXTRA_ENV_KWARGS_VAR = "ENVBUS_SERVE_EXTRA_ENV_KWARGS"
STOP_GRACE_S = 30.0
"""How long stop() waits for teardown hooks before it kills."""
_DRAIN_S = 5.0
"""How long stop() waits for jobs of others on a shared bus."""
_LOADING_GRACE_S = 3.0
"""The same for servers that have not loaded yet: there is nothing to tear down."""
_KILL_WAIT_S = 3.0
_POLL_S = 0.05


class Sidecar:
    """Servers of our own and a client for them; made by start().

    Attributes:
        client: Connected to them.
        address: The NATS address that they use; of a bus of their own it holds the token.
        processes: The servers, ended ones included.
    """

    def __init__(
        self, env_id: str, client: NATSEnvClient, *, address: str, nats: EmbeddedNats | None, log_dir: Path | None
    ) -> None:
        self.client = client
        self.address = address
        self.processes: tuple[ServerProcess, ...] = ()
        self._env_id = env_id
        self._nats = nats
        self._own_log_dir = log_dir
        self._lifeline = Lifeline()

    @classmethod
    async def start(
        cls,
        env_id: str,
        env_args: Mapping[str, Any] | None = None,
        *,
        address: str | None = None,
        workers: int = 1,
        max_concurrent: int | None = None,
        name: str | None = None,
        prefix: str = DEFAULT_PREFIX,
        log_file: str | Path | None = None,
        log_level: str = "INFO",
        allow_keys: Sequence[str] = (),
        allow_urls: Sequence[str] = (),
        env_dir_path: str | Path | None = None,
        extra_env_kwargs: Mapping[str, Any] | None = None,
        startup_timeout_s: float = 600.0,
    ) -> Self:
        """Start servers and return when the first is ready; the others join when they have loaded.

        Args:
            env_id: As for load_environment.
            env_args: Its arguments; JSON values.
            address: NATS address; None: a bus of their own on this host.
            workers: Server processes.
            max_concurrent: Rollouts at a time per process; None: the server's default.
            name: The env's name on the bus.
            prefix: First token of all subjects.
            log_file: Where they log, appended; with several workers ``-1``, ``-2``… come before its suffix.
                None: a temporary file that is kept only if a server crashes.
            log_level: Level of their logs.
            allow_keys: ``"VARIABLE=ORIGIN"`` pairs: which API keys rollouts may use, and where; by default
                none with an address, and all that this process has, anywhere, on a bus of their own.
            allow_urls: Patterns of URLs that may be called without a key; by default as for allow_keys.
            env_dir_path: A folder to find environments in.
            extra_env_kwargs: Settings of the loaded environment, see Environment.set_kwargs.
            startup_timeout_s: How long loading may take.

        Raises:
            EnvironmentLoadError: A server could not load the environment, or ended while it did.
            BusError: The address is of no use.
            UsageError: An argument is not usable.
        """
        if workers < 1:
            raise UsageError(f"workers must be at least 1, not {workers}")
        if not address and not allow_keys and not allow_urls:
            allow_keys = ("*",)  # nobody but the holder of its token reaches a private bus
        options = _serve_options(env_id, max_concurrent, name, prefix, log_level, env_dir_path)
        options[:0] = _model_options(allow_keys, allow_urls, uses_proxies=not address)
        variables = {ENV_ARGS_VAR: _json(env_args), EXTRA_ENV_KWARGS_VAR: _json(extra_env_kwargs)}
        Subjects(env_name(env_id, env_args, name), prefix)  # raises before anything is started
        nats = None
        if not address:
            nats, address = await _private_bus()
        log_dir = Path(tempfile.mkdtemp(prefix="envbus-sidecar-")) if log_file is None else None
        client = NATSEnvClient(address, env_id, env_args=env_args, name=name, prefix=prefix)
        sidecar = cls(env_id, client, address=address, nats=nats, log_dir=log_dir)
        try:
            await client.connect()
            files = _log_files(Path(log_file) if log_file else (log_dir or Path()) / "server.log", workers)
            sidecar._spawn(options, {URL_VAR: address, **variables}, files)
            await sidecar._until_ready(startup_timeout_s)
        except BaseException:
            await sidecar.stop(grace_s=_LOADING_GRACE_S)
            raise
        return sidecar

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Close the client and stop the servers, all at the same time; what is not gone after the grace is killed."""
        crashed = any(process.returncode not in (None, 0) for process in self.processes)
        try:
            await self.client.close()
            for process in self.processes:
                process.terminate()
            if self._nats is None:
                await self._gone(_DRAIN_S)  # other clients of that bus may have jobs here
            self._lifeline.close()  # ends the servers' wait for jobs, not their teardown
            await self._gone(grace_s)
        finally:
            self.kill()
            await self._gone(_KILL_WAIT_S)
            if self._nats is not None:
                await self._nats.stop()
            if self._own_log_dir is not None and not crashed:
                shutil.rmtree(self._own_log_dir, ignore_errors=True)

    def kill(self) -> None:
        """Kill the servers and what they started, at once."""
        for process in self.processes:
            process.kill()
        self._lifeline.close()

    async def all_ended(self) -> None:
        """Wait until no server runs any more, whatever the reason."""
        while any(process.returncode is None for process in self.processes):  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(_POLL_S)

    def describe_end(self) -> str:
        """Say how the servers ended, with the last log lines of the last one."""
        ends = ", ".join(f"process {process.pid}: {process.end}" for process in self.processes)
        return f"no server of env {self._env_id!r} runs any more ({ends}); {self.processes[-1].quoted_log()}"

    def _spawn(self, options: Sequence[str], variables: Mapping[str, str], log_files: Sequence[Path]) -> None:
        for log_file in log_files:
            process = ServerProcess(options, variables=variables, log_file=log_file, lifeline=self._lifeline)
            self.processes += (process,)
        self._lifeline.close_read_end()

    async def _until_ready(self, timeout_s: float) -> None:
        ready = asyncio.ensure_future(self.client.wait_for_server(timeout_s=timeout_s))
        ended = asyncio.ensure_future(self._first_end())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and isinstance(ready.exception(), EnvironmentCrashedError):
                # A server told of its failure on the bus; its end, which follows, says more.
                await asyncio.wait({ended}, timeout=_KILL_WAIT_S)
            if ended.done():
                raise ended.result().load_error(self._env_id)
            ready.result()
        finally:
            for waiting in (ready, ended):
                waiting.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _first_end(self) -> ServerProcess:
        while True:
            for process in self.processes:
                if process.returncode is not None:
                    return process
            await asyncio.sleep(_POLL_S)

    async def _gone(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self.all_ended()
        except TimeoutError:
            pass


async def _private_bus() -> tuple[EmbeddedNats, str]:
    """Start a bus and return it with its address, which holds the token that it asks for."""
    token = secrets.token_hex(16)
    nats = await EmbeddedNats.start(config=f'authorization: {{token: "{token}"}}')
    return nats, nats.url.replace("://", f"://{token}@", 1)


def _serve_options(
    env_id: str,
    max_concurrent: int | None,
    name: str | None,
    prefix: str,
    log_level: str,
    env_dir_path: str | Path | None,
) -> list[str]:
    options = ["--prefix", prefix, "--log-level", log_level, "--verbose"]
    if max_concurrent is not None:
        options += ["--max-concurrent", str(max_concurrent)]
    if name is not None:
        options += ["--name", name]
    _, folders = own_import_paths()
    for folder in [*([str(env_dir_path)] if env_dir_path else []), *folders]:
        options += ["--env-dir-path", folder]
    return [*options, "--", env_id]


def _model_options(allow_keys: Sequence[str], allow_urls: Sequence[str], *, uses_proxies: bool) -> list[str]:
    options = ["--model-proxy"] if uses_proxies else []
    for pair in allow_keys:
        options += ["--allow-key", pair]
    for pattern in allow_urls:
        options += ["--allow-url", pattern]
    return options


def _json(values: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(dict(values or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"arguments for a server process must be JSON values: {error}") from error


def _log_files(log_file: Path, workers: int) -> list[Path]:
    if workers == 1:
        return [log_file]
    return [log_file.with_stem(f"{log_file.stem}-{number}") for number in range(1, workers + 1)]
