"""What an eval shows while it runs: one live block on a terminal, plain lines elsewhere.

Logs and prints go through the same console, so that nothing is drawn over. It also
keeps the outputs, so that an interrupted run still has a summary.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from envbus.cli.formats import duration, failures, number, plural
from envbus.evaluation import EvalCallbacks, RunningStats
from envbus.types import GenerateMetadata, RolloutOutput, RolloutProgress

PLAIN_INTERVAL_S = 5.0
_ROLLING = 50
_SHOWN = 6
"""Running rollouts whose turn is shown."""


class EvalDisplay(EvalCallbacks):
    """Shows a run.

    Args:
        console: Everything goes here.
        live: Draw a block that is updated in place; else print lines now and then.
    """

    def __init__(self, console: Console, *, live: bool) -> None:
        self.outputs: list[RolloutOutput] = []
        self.metadata: GenerateMetadata | None = None
        """Set when the run is over, whether finished or not."""
        self._console = console
        self._stats = RunningStats()
        self._recent: deque[float] = deque(maxlen=_ROLLING)
        self.wants_progress = live
        self._turns: dict[int, dict[int, tuple[str, int]]] = {}
        """Of running rollouts: the position of a call, its members, each with its example and turn."""
        self._total = 0
        self._kept = 0
        self._status = ""
        self._clock = time.monotonic()
        self._last_line = 0.0
        self._spinner = Spinner("dots")
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True) if live else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the live block away; what follows is printed below what came before."""
        if self._live:
            self._live.stop()

    def status(self, text: str) -> None:
        """Say what the run waits for; empty for nothing."""
        if text and text != self._status and not self._live:
            self._print(text)
        self._status = text

    def on_start(self, total: int, resumed: list[RolloutOutput]) -> None:
        """EvalCallbacks: the run begins."""
        self.status("")
        self._clock = time.monotonic()
        self._total, self._kept = total, len(resumed)
        for output in resumed:
            self._count(output)
        if not self._live:
            self._last_line = self._clock
            self._print(f"{plural(total, 'rollout')} to run" + (f", {len(resumed)} kept" if resumed else ""))

    def on_output(self, output: RolloutOutput) -> None:
        """EvalCallbacks: a rollout has ended."""
        self._count(output)
        self.status("")
        now = time.monotonic()
        if not self._live and (now - self._last_line >= PLAIN_INTERVAL_S or self._stats.done == self._total):
            self._last_line = now
            self._print(self._progress_text())

    def on_progress(self, position: int, progress: RolloutProgress | None) -> None:
        """EvalCallbacks: a rollout tells which turn it is at."""
        if progress is None:
            self._turns.pop(position, None)
        elif isinstance(turn := progress.data.get("turn"), int):
            member = progress.data.get("position", 0)
            example = str(progress.data.get("example_id", position))
            self._turns.setdefault(position, {})[member] = (example, turn)

    def on_log(self, message: str) -> None:
        """EvalCallbacks: something worth telling."""
        self._print(message)

    def on_end(self, metadata: GenerateMetadata) -> None:
        """EvalCallbacks: the run is over."""
        self.metadata = metadata

    def _count(self, output: RolloutOutput) -> None:
        self.outputs.append(output)
        before = self._stats.reward_sum, self._stats.num_rewards
        self._stats.update(output)
        if self._stats.num_rewards > before[1]:
            self._recent.append(self._stats.reward_sum - before[0])

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    # ---- text

    def _progress_text(self) -> str:
        return f"{self._stats.done}/{self._total}  " + "  ".join(self._parts())

    def _parts(self) -> list[str]:
        stats = self._stats
        parts = [f"reward {number(stats.mean_reward)}"]
        if stats.num_rewards > _ROLLING:
            parts.append(f"last {_ROLLING}: {number(sum(self._recent) / len(self._recent))}")
        if stats.failed:
            parts.append(f"failed {stats.failed} ({failures(stats.errors_by_type)})")
        if stats.input_tokens or stats.output_tokens:
            parts.append(f"tokens {stats.input_tokens:,} in, {stats.output_tokens:,} out")
        elapsed_s = time.monotonic() - self._clock
        new = stats.done - self._kept
        if new and elapsed_s > 0:
            parts.append(f"{new / elapsed_s:.1f}/s")
        parts.append(f"{duration(elapsed_s)} elapsed")
        if new and stats.done < self._total:
            parts.append(f"{duration(elapsed_s / new * (self._total - stats.done))} to go")
        return parts

    def _turns_text(self) -> str:
        """Those that are furthest: what holds the run up is among them."""
        running = [turn for members in self._turns.values() for turn in members.values()]
        furthest = sorted(running, key=lambda rollout: -rollout[1])[:_SHOWN]
        more = f", {len(running) - _SHOWN} more" if len(running) > _SHOWN else ""
        return ", ".join(f"example {example}: turn {turn}" for example, turn in furthest) + more

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = []
        if self._total:
            bar = Table.grid(padding=(0, 1))
            progress = ProgressBar(total=self._total, completed=self._stats.done, width=40)
            bar.add_row(progress, Text(f"{self._stats.done}/{self._total}", style="bold"))
            rows += [bar, Text("  ".join(self._parts()))]
        if self._turns:
            rows.append(Text(self._turns_text(), style="dim", no_wrap=True, overflow="ellipsis"))
        if self._status:
            self._spinner.update(text=Text(self._status))
            rows.append(self._spinner)
        return Group(*rows)
