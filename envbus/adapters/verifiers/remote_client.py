"""The classic library's EnvClient over the bus: what an Environment of verifiers 0.1.x sends its rollouts to.

Calls, cancels and closing are NATSEnvClient's; here are the library's requests, answers and errors.
Imports verifiers: import it only where that is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verifiers.serve import (
    EnvClient,
    HealthRequest,
    HealthResponse,
    RunGroupRequest,
    RunGroupResponse,
    RunRolloutRequest,
    RunRolloutResponse,
    ServerError,
)

from envbus.adapters.verifiers.classic_outputs import classic_output
from envbus.adapters.verifiers.client_configs import client_config
from envbus.client import NATSEnvClient
from envbus.errors import CallTimeoutError, EnvbusError, NoServerError, ServerLoadingError
from envbus.settings import ClientSettings

_WAITED_IN_VAIN = (CallTimeoutError, NoServerError, ServerLoadingError)


class BusEnvClient(EnvClient):
    """Runs the library's requests on the servers of one env.

    A failed rollout is an output with ``error``. A failed call raises what the library's own client raises:
    TimeoutError after waiting in vain, else ServerError; the cause says more.

    Args:
        remote: The env on the bus; closed with this client.
        address: How to call its address in texts.
        settings: Those of ``remote``: how long is waited for servers.
    """

    def __init__(self, remote: NATSEnvClient, *, address: str, settings: ClientSettings) -> None:
        super().__init__(
            address=address,
            name=remote.env,
            startup_timeout=settings.loading_timeout_s,
            recovery_timeout=settings.no_server_timeout_s,
        )
        self.remote = remote

    async def wait_for_server_startup(self, timeout: float | None = None) -> None:
        """Wait until a server of the env takes rollouts.

        Raises:
            TimeoutError: None does in time.
        """
        with self._library_errors():
            await self.remote.wait_for_server(timeout_s=timeout)

    async def handle_health_request(self, request: HealthRequest, timeout: float | None) -> HealthResponse:
        """Whether a server of the env takes rollouts."""
        try:
            async with asyncio.timeout(timeout):
                healthy = await self.remote.health()
        except TimeoutError:
            healthy = False
        return HealthResponse(success=healthy, error=None if healthy else f"no server of {self.name} takes rollouts")

    async def handle_run_rollout_request(self, request: RunRolloutRequest, timeout: float | None) -> RunRolloutResponse:
        """Run one rollout."""
        with self._library_errors():
            async with asyncio.timeout(timeout):
                output = await self.remote.run_rollout(request.input, **_settings(request, [request.input]))
        return RunRolloutResponse(output=classic_output(output, request.input))

    async def handle_run_group_request(self, request: RunGroupRequest, timeout: float | None) -> RunGroupResponse:
        """Run the rollouts of one example and score them together."""
        inputs = request.group_inputs
        with self._library_errors():
            async with asyncio.timeout(timeout):
                outputs = await self.remote.run_group(inputs, **_settings(request, inputs))
        whole = [classic_output(output, example) for output, example in zip(outputs, inputs, strict=True)]
        return RunGroupResponse(outputs=whole)

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        await self.remote.close()

    @contextmanager
    def _library_errors(self) -> Iterator[None]:
        try:
            yield
        except _WAITED_IN_VAIN as error:
            raise TimeoutError(f"env {self.name}: {error}") from error
        except EnvbusError as error:
            raise ServerError(f"env {self.name}: {error}") from error


def _settings(request: Any, inputs: list[Any]) -> dict[str, Any]:
    return {
        "client": client_config(request.client_config.model_dump(), inputs),
        "model": request.model,
        "sampling_args": request.sampling_args,
        "max_retries": request.max_retries,
        "state_columns": request.state_columns,
    }
