"""Time limits, sizes and counts of clients and servers, each with its default and unit.

Every field can be set by an environment variable: ENVBUS_CLIENT_<FIELD> or
ENVBUS_SERVER_<FIELD>. Unknown fields, and variables that no field has, are refused.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import Self

from pydantic import Field, model_validator
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
MAX_REPORT_BYTES = 64 * MIB
"""Of one progress report."""
PROBE_TIMEOUT_S = 2.0
"""How long a request that only asks (check, info, fetch of a part) waits for its answer."""


_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_\w+)?")
"""What Kubernetes adds to each container's variables for a service of that name."""


_PREFIXES = ("ENVBUS_CLIENT_", "ENVBUS_SERVER_", "ENVBUS_SERVE_")
"""Of settings, and of the options of ``envbus serve``."""


class _Settings(BaseSettings):
    """Refuses variables that set nothing: a limit that is misspelt would never be applied."""

    @model_validator(mode="after")
    def _no_unknown_variables(self) -> Self:
        prefix = self.model_config["env_prefix"]
        fields = {name.upper() for name in type(self).model_fields}
        for variable in os.environ:
            if (meant := _meant(variable.upper(), prefix, fields)) is not None:
                raise ValueError(f"no setting {variable}; did you mean {meant}?")
            field = variable.upper().removeprefix(prefix)
            if variable.upper().startswith(prefix) and field not in fields and not _KUBERNETES.fullmatch(field):
                close = difflib.get_close_matches(field, sorted(fields), n=1)
                raise ValueError(f"no setting {variable}" + (f"; did you mean {prefix}{close[0]}?" if close else ""))
        return self


def _meant(variable: str, prefix: str, fields: set[str]) -> str | None:
    """What was meant by a variable with a field of these behind a misspelt prefix."""
    for field in fields:
        head = variable.removesuffix(field)
        if head != variable and head not in _PREFIXES and difflib.get_close_matches(head, [prefix], cutoff=0.85):
            return prefix + field
    return None


class ClientSettings(_Settings):
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
    max_undelivered_bytes: int = Field(256 * MIB, gt=0)
    """Large results pulled and not yet taken by the caller, whose loop may be blocked; others stay on the servers."""
    part_retries: int = Field(5, ge=1)
    """Tries for one part before its transfer fails."""
    close_timeout_s: float = Field(2.0, gt=0)
    """How long close() waits for its cancels to be answered."""


class ServerSettings(_Settings):
    """Limits of one NATSEnvServer."""

    model_config = SettingsConfigDict(env_prefix="ENVBUS_SERVER_", extra="forbid", frozen=True)

    beat_interval_s: float = Field(1.0, gt=0)
    grant_ttl_s: float = Field(2.0, gt=0)
    """A grant that is not used in this time is taken back."""
    wait_ttl_s: float = Field(10.0, gt=0)
    """A waiting client that does not repeat itself for this long leaves the line."""
    max_priority: int = Field(100, ge=0)
    """A higher priority counts as this one; 0: all clients take turns alike."""
    probe_after_s: float = Field(3.0, gt=0)
    """A client with jobs that is silent for this long has its inbox probed."""
    orphan_grace_s: float = Field(10.0, gt=0)
    """A client whose inbox is gone for this long loses its jobs."""
    orphan_timeout_s: float = Field(300.0, gt=0)
    """A client that is silent for this long loses its jobs, even if its inbox is there."""
    hold_results_s: float = Field(600.0, gt=0)
    """How long a result is kept for a client that does not collect it."""
    hold_results_bytes: int = Field(2 * GIB, gt=0)
    """Memory for results that wait to be collected; while it is used up, no more jobs are taken (from one client:
    while half of it is)."""
    hold_inputs_bytes: int = Field(2 * GIB, gt=0)
    """Memory for inputs of jobs that run or are still coming in; while it is used up, no more jobs are taken (from
    one client: while half of it is)."""
    max_input_bytes: int = Field(256 * MIB, gt=0)
    """A larger input is refused."""
    max_result_bytes: int = Field(1 * GIB, gt=0, le=MAX_BODY_BYTES)
    """A larger result ends in ResultTooLargeError at the client."""
    progress_window_bytes: int = Field(1 * MIB, gt=0)
    """Progress of one job that its caller has not taken; while it is used up, the environment's ``report`` waits."""
    grace_s: float = Field(30.0, ge=0)
    """How long a stop waits for running rollouts before it cancels them."""
    collect_grace_s: float = Field(5.0, ge=0)
    """How long a stop waits for finished results to be collected."""
    teardown_timeout_s: float = Field(120.0, gt=0)
    """How long the environment's teardown hooks may take."""
