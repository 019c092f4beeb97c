"""Which server processes one env shall have, and what to do about each (pure).

Events and a clock value in, instructions out. An env has places, each with one server
and, in a rolling restart, its successor; servers that leave are followed until they end.
A broken env stops launching after a few ends while loading; its budget is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from envbus.controller.instructions import Ask, Drain, Instruction, Kill, Launch, Note, Stop
from envbus.controller.liveness import Signs, Vitals
from envbus.controller.places import Member, Place, State, View
from envbus.controller.policies import LivenessPolicy, RestartPolicy

ASK_EVERY_S = 2.0
DRAIN_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Rules:
    """How one env is run.

    Attributes:
        stop_limit_s: How long an orderly stop may take: grace, collecting and teardown.
    """

    restart: RestartPolicy = field(default_factory=RestartPolicy)
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)
    stop_limit_s: float = 165.0


class EnvSupervisor:
    """The servers of one env on one controller.

    Args:
        replicas: Servers wanted.
        new_id: Makes a server id.
        random: Makes a number in [0, 1): the jitter of restart delays.
    """

    def __init__(
        self, env: str, *, replicas: int, rules: Rules, new_id: Callable[[], str], random: Callable[[], float]
    ) -> None:
        self.env = env
        self.replicas = replicas
        self.failed: str | None = None
        """Why no server is launched any more."""
        self._rules = rules
        self._new_id = new_id
        self._random = random
        self._generation = 0
        self._places: dict[int, Place] = {}
        self._leaving: dict[str, Member] = {}
        self._load_crashes = 0
        self._stopping = False

    # ---- what is there

    @property
    def ready_count(self) -> int:
        """Servers that take jobs."""
        return sum(place.is_ready for place in self._places.values())

    @property
    def is_restarting(self) -> bool:
        """Whether a rolling restart is under way."""
        return any(self._is_stale(place) for place in self._places.values())

    def servers(self) -> set[str]:
        """Ids of all servers that have not ended."""
        return {member.server for member in self._members()}

    def views(self) -> Iterator[View]:
        """Every server, and every place that is empty after one ended."""
        for place in sorted(self._places.values(), key=lambda place: place.slot):
            for member in (place.current, place.successor):
                if member is not None:
                    yield View(
                        member.server, place.slot, member.generation, member.phase, place.restarts, place.last_exit
                    )
            if place.current is None and place.last_server:
                state: State = "failed" if self.failed else "backoff"
                yield View(place.last_server, place.slot, self._generation, state, place.restarts, place.last_exit)
        for member in self._leaving.values():
            yield View(member.server, member.slot, member.generation, member.phase, 0, None)

    def _members(self) -> Iterator[Member]:
        for place in self._places.values():
            if place.current is not None:
                yield place.current
            if place.successor is not None:
                yield place.successor
        yield from self._leaving.values()

    def _member(self, server: str) -> Member | None:
        return next((member for member in self._members() if member.server == server), None)

    # ---- orders

    def adopt(self, server: str, *, slot: int, generation: int, is_wanted: bool, now: float) -> list[Instruction]:
        """Take over a server that an earlier controller launched; before start(), oldest generation first.

        Args:
            slot: Its place there.
            generation: Its generation there.
            is_wanted: False: the env's description has changed since, so it is replaced.
            now: Clock.
        """
        member = Member(server, slot, generation, Vitals.begin(now, has_beaten=True), adopted=True)
        place = self._places.get(slot)
        if place is None and len(self._places) < self.replicas:
            self._places[slot] = Place(slot, current=member, last_server=server)
        elif place is not None and place.successor is None:
            place.successor = member
        else:
            return self._leave(member, now)
        self._generation = max(self._generation, generation + (not is_wanted))
        return [Note(self.env, f"took over server {server[:8]} (place {slot})", server=server)]

    def start(self, now: float) -> list[Instruction]:
        """Launch what is missing."""
        return self._settle(now)

    def scale(self, replicas: int, now: float) -> list[Instruction]:
        """Run this many servers; a budget that was used up is restored."""
        if self._stopping:
            return []
        self.replicas = replicas
        self._forgive()
        return self._settle(now)

    def restart(self, now: float) -> list[Instruction]:
        """Replace all servers one by one."""
        if self._stopping:
            return []
        self._generation += 1
        self._forgive()
        return [Note(self.env, "rolling restart begins"), *self._settle(now)]

    def stop(self, now: float) -> list[Instruction]:
        """End all servers, each within its grace."""
        if self._stopping:
            return []
        self._stopping = True
        for member in list(self._members()):
            self._leaving[member.server] = member
        self._places.clear()
        return [
            order for member in self._leaving.values() if member.phase != "stuck" for order in self._stop(member, now)
        ]

    def hurry(self) -> list[Instruction]:
        """While stopping: have running rollouts cancelled now; teardown still runs."""
        return [Stop(self.env, server) for server in self._leaving]

    def _forgive(self) -> None:
        self.failed = None
        self._load_crashes = 0
        for place in self._places.values():
            place.failures = 0
            place.retry_at = None

    # ---- events

    def beat(self, server: str, signs: Signs, now: float) -> list[Instruction]:
        """A heartbeat of one of these servers."""
        member = self._member(server)
        if member is None:
            return []
        member.vitals.beat(signs, now)
        if server in self._leaving:
            return []
        if signs.state in ("draining", "stopping"):
            return self._on_own_leave(member, now)
        if signs.state in ("ready", "full") and member.ready_at is None:
            return self._on_ready(member, now)
        return []

    def heard(self, server: str, now: float) -> None:
        """It answered when it was asked."""
        member = self._member(server)
        if member is not None:
            member.vitals.hear(now)

    def outage(self, outage_s: float) -> None:
        """The bus was away for so long: nobody could be heard."""
        for member in self._members():
            member.vitals.shift(outage_s)

    def exited(self, server: str, reason: str, now: float) -> list[Instruction]:
        """A server's process has ended, or could not be started."""
        if self._leaving.pop(server, None) is not None:
            note = Note(self.env, f"server {server[:8]} has ended: {reason}", server=server)
            return [note, *self._settle(now)]
        for place in self._places.values():
            for member in (place.current, place.successor):
                if member is not None and member.server == server:
                    return [*self._on_unwanted_end(place, member, reason, now), *self._settle(now)]
        return []

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        orders: list[Instruction] = []
        for member in list(self._members()):
            orders += self._look_at(member, now)
        for place in self._places.values():
            ready_at = place.current.ready_at if place.current is not None else None
            if ready_at is not None and now - ready_at >= self._rules.restart.healthy_after_s:
                place.failures = 0
        return orders + self._settle(now)

    def _on_ready(self, member: Member, now: float) -> list[Instruction]:
        member.ready_at = now
        member.phase = "running"
        self._load_crashes = 0
        place = self._places[member.slot]
        orders: list[Instruction] = []
        if place.successor is member:
            old, place.current, place.successor = place.current, member, None
            orders += self._leave(old, now) if old is not None else []
        text = f"place {member.slot} is ready ({self.ready_count} of {self.replicas}), server {member.server[:8]}"
        return [Note(self.env, text, server=member.server), *orders, *self._settle(now)]

    def _on_own_leave(self, member: Member, now: float) -> list[Instruction]:
        """Somebody else had it drained: its place is free for another, and it is followed until it ends."""
        place = self._places[member.slot]
        place.remove(member)
        place.retry_at = now + self._delay_s(1)  # servers that always leave must not make a tight loop
        member.phase = "draining"
        self._leaving[member.server] = member
        note = Note(self.env, f"server {member.server[:8]} drains", server=member.server)
        return [note, *self._settle(now)]

    def _on_unwanted_end(self, place: Place, member: Member, reason: str, now: float) -> list[Instruction]:
        loaded = member.ready_at is not None or member.adopted
        reason = f"{member.doubt}; {reason}" if member.doubt else reason
        place.remove(member)
        place.was_lost = True
        place.last_server, place.last_exit = member.server, reason
        place.failures += 1
        delay_s = self._delay_s(place.failures)
        place.retry_at = now + delay_s
        self._load_crashes += not loaded
        what = "ended" if loaded else "ended while loading"
        text = f"place {place.slot}: server {member.server[:8]} {what}: {reason}"
        if not loaded and self._load_crashes >= self._rules.restart.max_failures:
            self.failed = f"{self._load_crashes} servers in a row {what}, the last one with {reason}"
            text += "\ngiven up: no more servers until it is scaled or restarted"
            return [Note(self.env, text, "error", server=member.server)]
        first, end, rest = text.partition("\n")
        text = f"{first} (next try in {delay_s:.1f} s){end}{rest}"
        return [Note(self.env, text, "warning", server=member.server)]

    def _delay_s(self, failures: int) -> float:
        policy = self._rules.restart
        longest_s = min(policy.max_delay_s, policy.initial_delay_s * 2.0 ** min(failures - 1, 30))
        return longest_s * (0.5 + 0.5 * self._random())

    # ---- towards what is wanted

    def _settle(self, now: float) -> list[Instruction]:
        if self._stopping:
            return []
        orders = self._resize(now)
        if self.failed is None:
            for place in self._places.values():
                if place.current is None and _is_due(place, now):
                    place.current = self._launch(place, now, orders)
            orders += self._roll(now)
        return orders

    def _resize(self, now: float) -> list[Instruction]:
        orders: list[Instruction] = []
        for place in self._surplus():
            del self._places[place.slot]
            for member in (place.current, place.successor):
                orders += self._leave(member, now) if member is not None else []
        slot = 0
        while len(self._places) < self.replicas:
            if slot not in self._places:
                self._places[slot] = Place(slot)
            slot += 1
        return orders

    def _surplus(self) -> list[Place]:
        """The places to give up: those without a ready server first, then the highest."""
        order = sorted(self._places.values(), key=lambda place: (place.is_ready, -place.slot))
        return order[: max(0, len(order) - self.replicas)]

    def _roll(self, now: float) -> list[Instruction]:
        """Go on with a rolling restart: one successor at a time, and only while all new servers are ready."""
        orders: list[Instruction] = []
        stale = [place for place in self._places.values() if self._is_stale(place)]
        for place in stale:
            if place.successor is not None and place.successor.generation < self._generation:
                orders += self._leave(place.successor, now)
                place.successor = None
            if not place.is_ready and place.successor is None and place.current is not None:
                orders += self._leave(place.current, now)
                place.current = self._launch(place, now, orders)
        waiting = [place for place in stale if place.is_ready]
        is_settled = all(place.is_ready for place in self._places.values() if not self._is_stale(place))
        if waiting and is_settled and not any(place.successor for place in waiting) and _is_due(waiting[0], now):
            waiting[0].successor = self._launch(waiting[0], now, orders)
        return orders

    def _is_stale(self, place: Place) -> bool:
        return place.current is not None and place.current.generation < self._generation

    def _launch(self, place: Place, now: float, orders: list[Instruction]) -> Member:
        member = Member(self._new_id(), place.slot, self._generation, Vitals.begin(now))
        place.restarts += place.was_lost
        place.was_lost = False
        place.retry_at = None
        place.last_server = member.server
        orders.append(Launch(self.env, place.slot, member.server, member.generation))
        return member

    # ---- ends

    def _leave(self, member: Member, now: float) -> list[Instruction]:
        """Have a server end without cutting a rollout; one that is not ready has none."""
        self._leaving[member.server] = member
        if member.phase == "stuck":
            return []
        if member.ready_at is None and not member.adopted:
            return self._stop(member, now)
        member.phase = "draining"
        member.drain_again_at = now + DRAIN_AGAIN_S
        return [Drain(self.env, member.server)]

    def _stop(self, member: Member, now: float) -> list[Instruction]:
        member.phase = "draining"
        member.drain_again_at = None
        member.kill_at = now + self._rules.stop_limit_s
        return [Stop(self.env, member.server)]

    def _look_at(self, member: Member, now: float) -> list[Instruction]:
        if member.kill_at is not None and now >= member.kill_at:
            member.kill_at = now + self._rules.liveness.kill_after_s
            return [Kill(self.env, member.server)]
        if member.phase == "stuck" or member.kill_at is not None:
            return []
        doubt = member.vitals.doubt(self._rules.liveness, now)
        if doubt is not None and doubt.level == "stuck":
            member.phase, member.doubt = "stuck", doubt.reason
            member.kill_at = now + self._rules.liveness.kill_after_s
            text = f"server {member.server[:8]} is stuck and is replaced: {doubt.reason}"
            stop = Stop(self.env, member.server)
            return [Note(self.env, text, "error", server=member.server), stop, stop]
        if doubt is not None:
            return self._suspect(member, doubt.reason, now)
        if member.phase == "suspect":
            member.phase = "running" if member.ready_at is not None else "starting"
        if member.drain_again_at is not None and now >= member.drain_again_at:
            member.drain_again_at = now + DRAIN_AGAIN_S
            return [Drain(self.env, member.server)]
        return []

    def _suspect(self, member: Member, reason: str, now: float) -> list[Instruction]:
        orders: list[Instruction] = []
        if member.phase in ("starting", "running"):
            member.phase = "suspect"
            text = f"server {member.server[:8]} is suspect: {reason}"
            orders.append(Note(self.env, text, "warning", server=member.server))
        if member.asked_at is None or now - member.asked_at >= ASK_EVERY_S:
            member.asked_at = now
            orders.append(Ask(self.env, member.server))
        return orders


def _is_due(place: Place, now: float) -> bool:
    return place.retry_at is None or now >= place.retry_at
