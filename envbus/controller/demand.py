"""The load of one env as its heartbeats tell it, and the part of it that falls to this controller (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from envbus.bus.messages import Beat
from envbus.controller.autoscale import Load

FRESH_S = 5.0
"""A beat older than this says nothing about now."""
_SERVING = ("ready", "full")


@dataclass(frozen=True, slots=True)
class _Heard:
    beat: Beat
    at: float


class EnvDemand:
    """The latest beats of an env's servers, those of other controllers included.

    Args:
        controller_id: Whose servers are scaled here.
        slots_per_server: Of these.
    """

    def __init__(self, controller_id: str, *, slots_per_server: int) -> None:
        self._controller_id = controller_id
        self._slots_per_server = slots_per_server
        self._heard: dict[str, _Heard] = {}
        self._ended = 0
        self._warned: set[str] = set()

    def beat(self, beat: Beat, now: float) -> None:
        """A server of the env has beaten."""
        before = self._heard.get(beat.server)
        self._heard[beat.server] = _Heard(beat, now)
        if beat.controller == self._controller_id and before is not None:
            self._ended += max(0, ended_jobs(beat) - ended_jobs(before.beat))

    def forget_silent(self, now: float) -> None:
        """Drop what says nothing about now any more."""
        self._heard = {server: heard for server, heard in self._heard.items() if now - heard.at <= FRESH_S}

    def gone(self, server: str) -> None:
        """A server has ended."""
        self._heard.pop(server, None)

    def in_flight(self, server: str) -> int | None:
        """Return how many rollouts a server ran at its last beat; None if that was too long ago."""
        heard = self._heard.get(server)
        return heard.beat.in_flight if heard is not None else None

    def load(self) -> Load:
        """Return this controller's share: its own jobs, and of those that wait as much as it has of the slots."""
        serving = [heard.beat for heard in self._heard.values() if heard.beat.state in _SERVING]
        own = [beat for beat in serving if beat.controller == self._controller_id]
        slots = sum(beat.slots for beat in serving)
        share = sum(beat.slots for beat in own) / slots if slots else 1.0
        # Clients tell every server how many jobs they have waiting: the beats overlap.
        waiting = max((beat.waiting_jobs for beat in serving), default=0)
        return Load(
            slots_per_server=self._slots_per_server,
            in_flight=sum(beat.in_flight for beat in own),
            waiting=waiting * share,
            ended=self._ended,
        )

    def stranger(self, beat: Beat) -> str | None:
        """Return whose server serves something else under the same name; once for each."""
        own = {heard.beat.fingerprint for heard in self._heard.values() if self._is_own(heard.beat)}
        if self._is_own(beat) or not own or beat.fingerprint in own:
            return None
        owner = f"controller {beat.controller}" if beat.controller else f"process {beat.pid}"
        if owner in self._warned:
            return None
        self._warned.add(owner)
        return f"{owner} on host {beat.host}"

    def _is_own(self, beat: Beat) -> bool:
        return beat.controller == self._controller_id


def ended_jobs(beat: Beat) -> int:
    """Jobs that the server has ended so far, whatever the outcome."""
    return beat.done + beat.failed + beat.cancelled
