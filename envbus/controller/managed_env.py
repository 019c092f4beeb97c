"""What a controller holds for each of its envs: its description, its supervisor, its load, its autoscaler."""

from __future__ import annotations

import random
import secrets

from envbus.bus.subjects import Subjects
from envbus.controller.autoscale import Autoscaler
from envbus.controller.demand import EnvDemand
from envbus.controller.spec import EnvSpec
from envbus.controller.supervision import EnvSupervisor, Rules
from envbus.settings import ServerSettings

STOP_MARGIN_S = 10.0


class ManagedEnv:
    """What belongs to one env."""

    def __init__(self, spec: EnvSpec, *, controller_id: str, prefix: str) -> None:
        settings = ServerSettings()
        limit_s = spec.grace + settings.teardown_timeout_s + settings.collect_grace_s + STOP_MARGIN_S
        self.spec = spec
        self.name = spec.bus_name
        self.subjects = Subjects(self.name, prefix)
        self.supervisor = EnvSupervisor(
            self.name,
            replicas=spec.first_replicas,
            rules=Rules(restart=spec.restart, liveness=spec.liveness, stop_limit_s=limit_s),
            new_id=lambda: secrets.token_hex(16),
            random=random.random,
        )
        self.demand = EnvDemand(controller_id, slots_per_server=spec.max_concurrent)
        self.autoscaler = Autoscaler(spec.autoscale) if spec.autoscale is not None else None
        self.is_wanted = True
        """False: it is in no fleet file any more, and its last servers are seen off."""

    @classmethod
    def leftover(cls, name: str, controller_id: str, prefix: str) -> ManagedEnv:
        """An env of an earlier fleet file: no servers of it are wanted, and those there are drain."""
        env = cls(EnvSpec(id=name, name=name, replicas=0), controller_id=controller_id, prefix=prefix)
        env.is_wanted = False
        return env
