"""Hooks into a running evaluation, for displays and loggers.

All are called on the evaluation's event loop. A hook that raises is logged
and changes nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from envbus.types import GenerateMetadata, RolloutOutput, RolloutProgress

logger = logging.getLogger(__name__)


class EvalCallbacks:
    """Does nothing; override what you need.

    Attributes:
        wants_progress: Set it to have on_progress called: rollouts then send what they report while they run.
    """

    wants_progress = False

    def on_start(self, total: int, resumed: list[RolloutOutput]) -> None:
        """The run begins.

        Args:
            total: Rollouts of the whole run, resumed ones included.
            resumed: Outputs kept from the saved run.
        """

    def on_output(self, output: RolloutOutput) -> None:
        """A rollout has ended, well or with an error."""

    def on_progress(self, position: int, progress: RolloutProgress | None) -> None:
        """A rollout tells how it is going.

        Args:
            position: Of its input among all inputs; a group counts by its first, and ``position`` in the data of its
                progress says which member it is of.
            progress: What it reported; None: the rollout or group has ended.
        """

    def on_log(self, message: str) -> None:
        """Something worth telling the user has happened."""

    def on_end(self, metadata: GenerateMetadata) -> None:
        """The run is over: finished, failed or cancelled."""


def call_safely(hook: Callable[..., None], *args: Any) -> None:
    """Call a hook; log what it raises."""
    try:
        hook(*args)
    except Exception:
        logger.exception("a callback raised; the run goes on")
