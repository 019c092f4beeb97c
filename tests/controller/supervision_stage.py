"""A pretended host for an EnvSupervisor: carries out its instructions and checks what must always hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from envbus.controller.instructions import Ask, Drain, Instruction, Kill, Launch, Note, Stop
from envbus.controller.liveness import Signs
from envbus.controller.places import State
from envbus.controller.policies import LivenessPolicy, RestartPolicy
from envbus.controller.supervision import EnvSupervisor, Rules

RESTART = RestartPolicy(initial_delay_s=1, max_delay_s=16, max_failures=3, healthy_after_s=60)
LIVENESS = LivenessPolicy(suspect_after_s=10, stuck_after_s=60, no_progress_s=1000)
STOP_LIMIT_S = 40.0


@dataclass
class Process:
    server: str
    slot: int
    generation: int
    state: str = "loading"
    drained: bool = False
    stops: int = 0
    killed: bool = False
    asked: int = 0


@dataclass
class Host:
    """The processes of one env, with a clock that only tests move."""

    replicas: int = 2
    random: float = 1.0
    now: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    launches: list[tuple[float, Launch]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = itertools.count()
        self.env = EnvSupervisor(
            "e",
            replicas=self.replicas,
            rules=Rules(RESTART, LIVENESS, STOP_LIMIT_S),
            new_id=lambda: f"s{next(numbers)}",
            random=lambda: self.random,
        )

    # ---- what the tests do

    def start(self) -> Host:
        self.obey(self.env.start(self.now))
        return self

    def obey(self, orders: Iterable[Instruction]) -> None:
        for order in orders:
            match order:
                case Launch(slot=slot, server=server, generation=generation):
                    assert server not in self.processes
                    self.launches.append((self.now, order))
                    self.processes[server] = Process(server, slot, generation)
                case Drain(server=server):
                    self.processes[server].drained = True
                case Stop(server=server):
                    self.processes[server].stops += 1
                case Kill(server=server):
                    self.processes[server].killed = True
                case Ask(server=server):
                    self.processes[server].asked += 1
                case Note(text=text):
                    self.notes.append(text)

    def wait(self, seconds: float, *, beating: bool = True) -> None:
        """Let time pass in steps of a second; every process beats."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1)
            if beating:
                self.beat_all()
            self.obey(self.env.tick(self.now))

    def beat_all(self) -> None:
        for process in list(self.processes.values()):
            self.beat(process.server)

    def beat(self, server: str, **fields: int) -> None:
        signs = Signs(self.processes[server].state, **fields)
        self.obey(self.env.beat(server, signs, self.now))

    def ready(self, *servers: str) -> None:
        for server in servers:
            self.processes[server].state = "ready"
            self.beat(server)

    def all_ready(self) -> Host:
        self.ready(*[process.server for process in self.processes.values() if process.state == "loading"])
        return self

    def end(self, server: str, reason: str = "exit code 1") -> None:
        del self.processes[server]
        self.obey(self.env.exited(server, reason, self.now))

    # ---- what they look at

    def states(self) -> dict[str, State]:
        return {view.server: view.state for view in self.env.views()}

    def staying(self) -> list[Process]:
        """Processes that nobody has asked to leave."""
        return [p for p in self.processes.values() if not (p.drained or p.stops or p.killed)]

    def launched(self) -> list[str]:
        return [launch.server for _, launch in self.launches]
