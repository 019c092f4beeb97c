"""A closed-loop model of servers (Slots) and clients (Dispatch, Attempts) around a queue group, in virtual time.

Modelled of NATS: messages take a random time, keep their order between two
parties, and may be lost; a push goes to a random server with a credit left, or
comes back as 503; a message to a dead server comes back as 503. A client that
is cut off hears nothing. Results are held by their server until collected.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from envbus.client.attempts import Attempts, CancelOn, Collect, Lost, Resend
from envbus.client.dispatch import Dispatch, PassGrant, Push, SayWaiting, UseGrant
from envbus.server.slots import AddCredits, SendGrant, Slots, WithdrawCredits

SHORTEST_HOP_S, LONGEST_HOP_S = 0.0001, 0.0006


class Simulation:
    """The clock, the network and everybody on it."""

    def __init__(self, *, seed: int = 0, loss: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.servers: dict[str, SimServer] = {}
        self.clients: dict[str, SimClient] = {}
        self.starts: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._last_arrival: defaultdict[tuple[str, str], float] = defaultdict(float)

    def server(self, name: str, capacity: int, *, opens_at: float = 0.0) -> SimServer:
        server = self.servers[name] = SimServer(self, name, capacity)
        self.at(opens_at, server.open)
        return server

    def client(self, name: str, **options: Any) -> SimClient:
        client = self.clients[name] = SimClient(self, name, **options)
        self.at(0.0, client.tick)
        return client

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time_s, self.now), next(self._order), do))

    def send(self, source: str, target: str, do: Callable[[], None], *, sure: bool = False) -> None:
        """Call ``do`` when the message arrives, if it does."""
        self.counts["messages"] += 1
        if not sure and self.random.random() < self.loss:
            self.counts["dropped"] += 1
            return
        arrival = self.now + self.random.uniform(SHORTEST_HOP_S, LONGEST_HOP_S)
        arrival = self._last_arrival[source, target] = max(arrival, self._last_arrival[source, target])
        self.at(arrival, do)

    def reply(self, source: str, client: SimClient, do: Callable[[], None], *, sure: bool = False) -> None:
        """As send(), to a client that may be dead or cut off by then."""
        self.send(source, client.name, lambda: do() if client.hears else None, sure=sure)

    def run(self, *, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, do = heapq.heappop(self._events)
            do()

    def run_until_done(self, *, limit_s: float) -> float:
        """Run until every client is done; returns when that was."""
        while not all(client.is_done for client in self.clients.values()):
            if not self._events or self.now > limit_s:
                stuck = {name: len(client.unfinished) for name, client in self.clients.items()}
                raise AssertionError(f"not done after {self.now:.1f} s: {stuck}")
            self.now, _, do = heapq.heappop(self._events)
            do()
        return self.now

    def settle(self) -> None:
        """Let time pass until every grant and every word in the line has run out."""
        self.run(until_s=self.now + 15.0)


class SimServer:
    """One server: its Slots, what runs, and its credits at the NATS server."""

    def __init__(self, sim: Simulation, name: str, capacity: int) -> None:
        self.sim = sim
        self.name = name
        self.slots = Slots(capacity, grant_ttl_s=2.0, wait_ttl_s=10.0)
        self.credits_at_nats = 0
        self.dead = False
        self.running: dict[str, int] = {}
        self.finished: set[str] = set()
        self.most_running = 0
        self.largest = 0
        self._frozen = False
        self._backlog: list[Callable[[], None]] = []

    def open(self) -> None:
        self.apply(self.slots.open())
        self._tick()

    def close(self) -> None:
        self.apply(self.slots.close())

    def kill(self) -> None:
        self.dead, self.credits_at_nats = True, 0

    def freeze(self) -> None:
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False
        backlog, self._backlog = self._backlog, []
        for do in backlog:
            do()

    @property
    def answers(self) -> bool:
        return not self.dead and not self._frozen

    def handle(self, do: Callable[[], None]) -> None:
        """Do it now, or when the process goes on; never if it is dead."""
        if self._frozen:
            self._backlog.append(do)
        elif not self.dead:
            do()

    def _tick(self) -> None:
        self.handle(lambda: self.apply(self.slots.tick(self.sim.now)))
        if not self.dead:
            self.sim.at(self.sim.now + 0.25, self._tick)

    def on_push(self, client: SimClient, job: str) -> None:
        if job in self.running or job in self.finished:
            self.apply(self.slots.bounce(self.sim.now))
            self._again(client, job)
            return
        admitted, instructions = self.slots.push(job, client.size, self.sim.now)
        self._start_or_refuse(client, job, admitted)
        self.apply(instructions)

    def on_granted(self, client: SimClient, job: str, grant: str) -> None:
        if job in self.running or job in self.finished:
            self.apply(self.slots.decline(grant, client.name, self.sim.now))
            self._again(client, job)
            return
        admitted, instructions = self.slots.redeem(grant, client.name, job, client.size, self.sim.now)
        self._start_or_refuse(client, job, admitted)
        self.apply(instructions)

    def on_pass(self, client: SimClient, grant: str) -> None:
        self.apply(self.slots.decline(grant, client.name, self.sim.now))

    def on_wait(self, client: SimClient, jobs: int) -> None:
        self.apply(
            self.slots.wait(client.name, inbox=client.name, jobs=jobs, priority=client.priority, now=self.sim.now)
        )

    def on_cancel(self, job: str) -> None:
        self.finished.discard(job)
        if self.running.pop(job, None) is not None:
            self.sim.counts["cancelled"] += 1
            self.apply(self.slots.release(job, self.sim.now))

    def on_collect(self, client: SimClient, job: str) -> None:
        if job in self.finished:
            self._deliver(client, job)

    def _start_or_refuse(self, client: SimClient, job: str, admitted: bool) -> None:
        if not admitted:
            self.sim.counts["busy"] += 1
            self.sim.reply(self.name, client, lambda: client.on_refused(job))
            return
        self.sim.starts[job] += 1
        self.running[job] = client.size
        self.most_running = max(self.most_running, sum(self.running.values()))
        self.largest = max(self.largest, client.size)
        self.sim.reply(self.name, client, lambda: client.on_accepted(job, self.name))
        self.sim.at(self.sim.now + client.duration_s(), lambda: self.handle(lambda: self._finish(client, job)))

    def _again(self, client: SimClient, job: str) -> None:
        self.sim.reply(self.name, client, lambda: client.on_accepted(job, self.name))
        if job in self.finished:
            self._deliver(client, job)

    def _finish(self, client: SimClient, job: str) -> None:
        if self.running.pop(job, None) is None:
            return
        self.finished.add(job)
        self.apply(self.slots.release(job, self.sim.now))
        self._deliver(client, job)

    def _deliver(self, client: SimClient, job: str) -> None:
        self.sim.reply(self.name, client, lambda: client.on_result(job, self.name), sure=True)

    def apply(self, instructions: Iterable[AddCredits | WithdrawCredits | SendGrant]) -> None:
        for instruction in instructions:
            match instruction:
                case AddCredits(count=count):
                    self._to_nats(lambda count=count: self._set_credits(self.credits_at_nats + count))
                case WithdrawCredits():
                    self._to_nats(self._leave)
                case SendGrant(client=name, grant=grant):
                    client = self.sim.clients[name]
                    self.sim.reply(self.name, client, lambda c=client, g=grant: c.on_granted(self.name, g))

    def _to_nats(self, do: Callable[[], None]) -> None:
        self.sim.send(self.name, "nats", do, sure=True)

    def _set_credits(self, count: int) -> None:
        self.credits_at_nats = 0 if self.dead else count

    def _leave(self) -> None:
        self.credits_at_nats = 0
        gone = lambda: self.apply(self.slots.credits_gone(self.sim.now))  # noqa: E731
        self.sim.send("nats", self.name, lambda: self.handle(gone), sure=True)


class SimClient:
    """One client: its Dispatch and Attempts, and the jobs it has."""

    def __init__(
        self,
        sim: Simulation,
        name: str,
        *,
        duration_s: Callable[[], float],
        size: int = 1,
        priority: int = 0,
        stall_timeout_s: float = 30.0,
    ) -> None:
        self.sim = sim
        self.name = name
        self.size = size
        self.priority = priority
        self.duration_s = duration_s
        self.dispatch = Dispatch(max_unaccepted=8, accept_timeout_s=1.5, wait_repeat_s=2.0)
        self.attempts = Attempts(max_attempts=5, stall_timeout_s=stall_timeout_s)
        self.unfinished: set[str] = set()
        self.results: Counter[str] = Counter()
        self.done_at = 0.0
        self.on_job_done: Callable[[], None] = lambda: None
        self.dead = False
        self._cut_off_at: float | None = None
        self._numbers = itertools.count()
        self._checked_at = 0.0
        self._planned = 0

    @property
    def is_done(self) -> bool:
        return self.dead or (not self.unfinished and not self._planned)

    @property
    def hears(self) -> bool:
        return not self.dead and self._cut_off_at is None

    def kill(self) -> None:
        self.dead = True

    def disconnect(self) -> None:
        self._cut_off_at = self.sim.now
        self.dispatch.disconnected()

    def reconnect(self) -> None:
        assert self._cut_off_at is not None
        self.attempts.shift_clocks(self.sim.now - self._cut_off_at)
        self._cut_off_at = None
        self.obey(self.dispatch.reconnected(self.sim.now))

    def submit_at(self, time_s: float, count: int) -> None:
        self._planned += 1
        self.sim.at(time_s, lambda: self._submit_planned(count))

    def _submit_planned(self, count: int) -> None:
        self._planned -= 1
        self.submit(count)

    def submit(self, count: int = 1) -> None:
        for _ in range(count):
            job = f"{self.name}-{next(self._numbers)}"
            self.unfinished.add(job)
            self.attempts.start(job)
            self.obey(self.dispatch.submit(job, self.sim.now))

    def tick(self) -> None:
        if self.dead:
            return
        if self.hears:
            self._tick(self.sim.now)
        self.sim.at(self.sim.now + 0.1, self.tick)

    def _tick(self, now: float) -> None:
        self.obey(self.dispatch.tick(now))
        self.follow(self.attempts.tick(now))
        if now - self._checked_at >= 1.0:
            self._checked_at = now
            self._check()

    def _check(self) -> None:
        for name, jobs in self.attempts.holders().items():
            server = self.sim.servers[name]
            if server.dead:
                self.follow(self.attempts.gone(name))
            elif server.answers:
                done = [job for job in jobs if job in server.finished]
                unknown = [job for job in jobs if job not in server.finished and job not in server.running]
                self.follow(self.attempts.status(name, done=done, unknown=unknown, now=self.sim.now))

    def on_accepted(self, job: str, server: str) -> None:
        self.obey(self.dispatch.accepted(job, self.sim.now))
        self.follow(self.attempts.accepted(job, server, self.sim.now))

    def on_refused(self, job: str) -> None:
        self.obey(self.dispatch.refused(job, self.sim.now))

    def on_gone(self, job: str, server: str) -> None:
        self.follow(self.attempts.gone(server))
        self.on_refused(job)

    def on_granted(self, server: str, grant: str) -> None:
        self.obey(self.dispatch.granted(server, grant, self.sim.now))

    def on_result(self, job: str, server: str) -> None:
        if job not in self.unfinished:
            self.sim.counts["late_results"] += 1
            return
        self.unfinished.discard(job)
        self.results[job] += 1
        self.done_at = self.sim.now
        self.follow(self.attempts.finish(job, server))
        self.obey(self.dispatch.remove(job, self.sim.now))
        self.on_job_done()

    def obey(self, instructions: Iterable[Push | UseGrant | PassGrant | SayWaiting]) -> None:
        for instruction in instructions:
            match instruction:
                case Push(job=job):
                    self.sim.counts["pushes"] += 1
                    self.sim.send(self.name, "nats", lambda job=job: self._at_queue_group(job))
                case UseGrant(job=job, server=name, grant=grant):
                    self._direct(name, lambda s, j=job, g=grant: s.on_granted(self, j, g), job)
                case PassGrant(server=name, grant=grant):
                    self.sim.counts["passes"] += 1
                    self._direct(name, lambda s, g=grant: s.on_pass(self, g), None)
                case SayWaiting(jobs=jobs):
                    self.sim.counts["waits"] += 1
                    for server in self.sim.servers.values():
                        self._direct(server.name, lambda s, n=jobs: s.on_wait(self, n), None)

    def follow(self, instructions: Iterable[Any]) -> None:
        for instruction in instructions:
            match instruction:
                case Resend(job=job):
                    self.sim.counts["resent"] += 1
                    self.obey(self.dispatch.resend(job, self.sim.now))
                case CancelOn(server=name, jobs=jobs):
                    for job in jobs:
                        self._direct(name, lambda s, j=job: s.on_cancel(j), None, sure=True)
                case Collect(job=job, server=name):
                    self._direct(name, lambda s, j=job: s.on_collect(self, j), None, sure=True)
                case Lost(job=job):
                    raise AssertionError(f"{job} is lost: {instruction}")

    def _at_queue_group(self, job: str) -> None:
        open_servers = [server for server in self.sim.servers.values() if server.credits_at_nats > 0]
        if not open_servers:
            self.sim.counts["503"] += 1
            self.sim.reply("nats", self, lambda: self.on_refused(job))
            return
        server = self.sim.random.choice(open_servers)
        server.credits_at_nats -= 1
        self.sim.send("nats", server.name, lambda: server.handle(lambda: server.on_push(self, job)))

    def _direct(self, name: str, do: Callable[[SimServer], None], job: str | None, *, sure: bool = False) -> None:
        server = self.sim.servers[name]

        def arrive() -> None:
            if not server.dead:
                server.handle(lambda: do(server))
            elif job is not None:
                self.sim.reply(name, self, lambda: self.on_gone(job, name))

        self.sim.send(self.name, name, arrive, sure=sure)
