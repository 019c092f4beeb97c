"""The limits that a fleet is run by: restarts, liveness, autoscaling; each with its default and unit."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Policy(BaseModel):
    """Base of the tables in a fleet file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RestartPolicy(Policy):
    """How ended servers come back."""

    initial_delay_s: float = Field(0.5, gt=0)
    """Pause before the first restart; doubled by each further one in the same place, with jitter."""
    max_delay_s: float = Field(30.0, gt=0)
    max_failures: int = Field(5, ge=1)
    """Ends while loading, in a row and with no server of the env becoming ready between, until it is given up."""
    healthy_after_s: float = Field(60.0, gt=0)
    """A server that was ready for this long has its place's restart delay reset."""


class LivenessPolicy(Policy):
    """When a server that has not ended is taken for dead. A busy loop or an outage of NATS is none of these."""

    suspect_after_s: float = Field(10.0, gt=0)
    """Silence of its heartbeats, while NATS is there, until it is asked."""
    stuck_after_s: float = Field(60.0, gt=0)
    """The same silence, questions unanswered, until it is replaced."""
    kill_after_s: float = Field(10.0, gt=0)
    """How long a stuck server has to end in order before it is killed."""
    blocked_after_s: float = Field(300.0, gt=0)
    """Its loop does not run and neither it nor what it started uses any CPU: replaced after this long."""
    no_progress_s: float = Field(3600.0, gt=0)
    """Jobs wait, jobs run and none ends: replaced after this long. Set it well above the longest rollout."""
    load_timeout_s: float = Field(1800.0, gt=0)
    """Loading takes longer than this: replaced."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.stuck_after_s < self.suspect_after_s:
            raise ValueError("stuck_after_s must not be below suspect_after_s")
        return self


class AutoscalePolicy(Policy):
    """How many servers an env gets."""

    min: int = Field(1, ge=1, le=1_000)
    max: int = Field(ge=1, le=1_000)
    target_utilisation: float = Field(0.8, gt=0, le=1)
    """Share of the slots that shall be in use."""
    clear_within_s: float = Field(30.0, gt=0)
    """Waiting jobs shall all have started within about this time."""
    down_after_s: float = Field(60.0, ge=0)
    """Servers are given up only if they were not needed at any time in this window."""
    down_step_s: float = Field(10.0, gt=0)
    """At most a quarter of the servers (at least one) is given up once in this time."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError("max must not be below min")
        return self
