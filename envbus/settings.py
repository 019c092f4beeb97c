"""Time limits, sizes and counts of clients and servers, each with its default and unit.

Every field can be set by an environment variable: ENVBUS_CLIENT_<FIELD> or
ENVBUS_SERVER_<FIELD>. Unknown fields are refused.
"""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MAX_BODY_BYTES = 4 * GIB - 1
"""What the wire format can carry at most."""
INLINE_BYTES = 256 * KIB
"""A body up to this size rides on its message; a larger one goes in parts."""
PART_BYTES = 512 * KIB
"""Size of one part of a larger body; less where the connection's max_payload is smaller."""
PROBE_TIMEOUT_S = 2.0
"""How long a request that only asks (check, info, fetch of a part) waits for its answer."""


class ClientSettings(BaseSettings):
    """Limits of one NATSEnvClient."""

    model_config = SettingsConfigDict(env_prefix="ENVBUS_CLIENT_", extra="forbid", frozen=True)

    connect_timeout_s: float = Field(10.0, gt=0)
    """How long the first connection to NATS may take."""
    accept_timeout_s: float = Field(1.5, gt=0)
    """A job that no server accepted within this time is sent again."""
    max_unaccepted: int = Field(8, ge=1)
    """Jobs pushed to the queue group and not yet accepted."""
    wait_repeat_s: float = Field(2.0, gt=0)
    """How often a waiting client tells the servers so again."""
    check_interval_s: float = Field(1.0, gt=0)
    """How often each server that holds jobs of this client is asked about them."""
    stall_timeout_s: float = Field(30.0, gt=0)
    """A server that gives no answer for this long is taken as stalled: its jobs are sent elsewhere too."""
    max_attempts: int = Field(3, ge=1)
    """Servers that may be lost under one job before the call fails."""
    no_server_timeout_s: float = Field(10.0, gt=0)
    """How long jobs wait while no server of the env is on the bus (bridges restarts)."""
    loading_timeout_s: float = Field(600.0, gt=0)
    """How long jobs wait while all servers of the env are still loading."""
    start_window_s: float = Field(30.0, gt=0)
    """A request that reaches a server later than this after it was sent is not started."""
    max_result_bytes: int = Field(1 * GIB, gt=0, le=MAX_BODY_BYTES)
    """A larger result ends in ResultTooLargeError."""
    pull_window: int = Field(8, ge=1)
    """Parts asked for and not yet here, over all transfers of this client."""
    part_retries: int = Field(5, ge=1)
    """Tries for one part before its transfer fails."""
    close_timeout_s: float = Field(2.0, gt=0)
    """How long close() waits for its cancels to be answered."""


class ServerSettings(BaseSettings):
    """Limits of one NATSEnvServer."""

    model_config = SettingsConfigDict(env_prefix="ENVBUS_SERVER_", extra="forbid", frozen=True)

    beat_interval_s: float = Field(1.0, gt=0)
    grant_ttl_s: float = Field(2.0, gt=0)
    """A grant that is not used in this time is taken back."""
    wait_ttl_s: float = Field(10.0, gt=0)
    """A waiting client that does not repeat itself for this long leaves the line."""
    probe_after_s: float = Field(3.0, gt=0)
    """A client with jobs that is silent for this long has its inbox probed."""
    orphan_grace_s: float = Field(10.0, gt=0)
    """A client whose inbox is gone for this long loses its jobs."""
    orphan_timeout_s: float = Field(300.0, gt=0)
    """A client that is silent for this long loses its jobs, even if its inbox is there."""
    hold_results_s: float = Field(600.0, gt=0)
    """How long a result is kept for a client that does not collect it."""
    hold_results_bytes: int = Field(2 * GIB, gt=0)
    """Memory for results that wait to be collected; over it the oldest are dropped and reported lost."""
    max_input_bytes: int = Field(256 * MIB, gt=0)
    """A larger input is refused."""
    max_result_bytes: int = Field(1 * GIB, gt=0, le=MAX_BODY_BYTES)
    """A larger result ends in ResultTooLargeError at the client."""
    grace_s: float = Field(30.0, ge=0)
    """How long a stop waits for running rollouts before it cancels them."""
    collect_grace_s: float = Field(5.0, ge=0)
    """How long a stop waits for finished results to be collected."""
    teardown_timeout_s: float = Field(120.0, gt=0)
    """How long the environment's teardown hooks may take."""
