"""Why nobody takes a client's waiting jobs: no server, all loading, or only other fingerprints.

Full servers are no reason to give up; these three are, each after its time.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from envbus.bus.connection import Connection
from envbus.bus.subjects import Subjects
from envbus.client.crashes import Crashes
from envbus.client.presence import hear_beats_if_allowed
from envbus.errors import CallError, FingerprintError, NoServerError, ServerLoadingError
from envbus.settings import ClientSettings


class Absence:
    """Keeps what the answers to "I have jobs waiting" said.

    Args:
        fingerprint: That the client pinned.
    """

    def __init__(
        self, connection: Connection, subjects: Subjects, *, settings: ClientSettings, fingerprint: str | None
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._settings = settings
        self._fingerprint = fingerprint
        self._since: dict[str, float] = {}
        """Since when every round of answers has said only this."""
        self._round: set[str] = set()

    def reset(self) -> None:
        """Start anew, as after an outage."""
        self._since.clear()
        self._round.clear()

    def asked(self, *, waiting: int, now: float) -> None:
        """The servers are asked once more; what the last round said is now complete."""
        if waiting == 0:
            # That no server is there stays known: jobs that come later need not find it out each for themselves.
            self._since = {kind: since for kind, since in self._since.items() if kind == "none"}
            self._round.clear()
            return
        said, self._round = self._round, set()
        if said:
            kind = said.pop() if len(said) == 1 else "some"
            self._since = {kind: self._since.get(kind, now)}

    def nobody(self, now: float) -> None:
        """NATS said that no server listens (503)."""
        self._round.add("none")
        self._since.setdefault("none", now)

    def heard(self, state: str, now: float) -> None:
        """A server answered."""
        self._since.pop("none", None)
        self._round.discard("none")
        self._round.add(state)

    @property
    def nobody_is_ready(self) -> bool:
        """Whether all that was heard is that no server is there, or that all are loading."""
        heard = self._round.union(self._since)
        return bool(heard) and heard <= {"none", "loading"}

    def verdict(self, now: float) -> str | None:
        """Return ``none``, ``loading`` or ``fingerprint`` once that has lasted too long."""
        limits = {
            "none": self._settings.no_server_timeout_s,
            "loading": self._settings.loading_timeout_s,
            "fingerprint": self._settings.no_server_timeout_s,
        }
        for kind, since in self._since.items():
            if kind in limits and now - since >= limits[kind]:
                return kind
        return None

    async def explain(self, verdict: str) -> CallError | None:
        """Return the error for the waiting jobs, with what is on the bus instead; None if a server came up now."""
        env = self._subjects.env
        async with Crashes(self._connection, self._subjects) as crashes:
            heard = await hear_beats_if_allowed(self._connection, self._subjects.prefix)
        beats, where = heard or [], self._connection.options.describe()
        if verdict == "loading":
            limit = self._settings.loading_timeout_s
            return ServerLoadingError(f"the servers of env {env!r} were still loading after {limit:g} s")
        if verdict == "fingerprint":
            there = sorted({beat.fingerprint for beat in beats if beat.env == env})
            return FingerprintError(f"no server of env {env!r} has fingerprint {self._fingerprint}; there: {there}")
        if any(beat.env == env and beat.state != "failed" for beat in beats):
            self.reset()
            return None
        present = None if heard is None else sorted({beat.env for beat in heard})
        return NoServerError(no_server_text(env, where, present, crashes.troubles()))


def no_server_text(env: str, where: str, present: list[str] | None, troubles: Sequence[str] = ()) -> str:
    """Say that an env has no server, why, what is there, and what the name may have been meant to be.

    Args:
        present: Names of the envs that are there; None: this user may not know.
    """
    if troubles:
        return f"no server of env {env!r} at {where}; " + "; ".join(troubles)
    if present is None:
        return f"no server of env {env!r} at {where}; this user may not hear which envs there are: check the name"
    if not present:
        return (
            f"no server of env {env!r} at {where}, and no other env either; "
            "start one with: envbus serve, or check the address"
        )
    if env in present:
        return f"no server of env {env!r} at {where} takes jobs: those that are there end, or could not load it"
    same_id = [name for name in present if name.partition("~")[0] == env]
    close = same_id[:1] or difflib.get_close_matches(env, present, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if close and "~" in close[0]:
        env_id = close[0].partition("~")[0]
        hint += f" Its servers have arguments: give {env_id!r} the same ones (-a), or that name (--name {close[0]})"
    if "~" in env:
        hint += "; what follows ~ stands for the env's arguments, which its servers must have been given too"
    return f"no server of env {env!r} at {where}; the envs there are: {', '.join(present)}{hint}"
