"""The attacks in which a user publishes or subscribes to what is none of its business, as a table.

Each can be made on any bus, and says whether it succeeded; each names what takes its protection away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attacked_bus import TRAINERS, Access, AttackedBus
from config_surgery import move_beside, permit

MARK = b"of the attack"


@dataclass(frozen=True)
class Overstep:
    """One attack.

    Attributes:
        kind: Which line of docs/security.md is about it.
        attacker: A user.
        action: What it does with ``subject``, which it must not.
        other: Who hears what it publishes, or publishes what it hears.
        others_subject: On which that one does so.
        home: A user of the account to be in for this, where trainers have accounts of their own.
    """

    kind: str
    attacker: str
    action: Literal["publish", "subscribe"]
    subject: str
    other: str
    others_subject: str
    queue: str = ""
    others_queue: str = ""
    home: str = "srv"

    def __str__(self) -> str:
        queue = f" in queue group {self.queue}" if self.queue else ""
        return f"{self.attacker} may {self.action} to {self.subject}{queue}"

    async def succeeds(self, bus: AttackedBus) -> bool:
        """Make the attack."""
        async with bus.wire(self.attacker) as attacker, bus.wire(self.other) as other:
            if self.action == "publish":
                other.subscribe(self.others_subject, queue=self.others_queue)
                await other.settle()
                attacker.publish(self.subject, MARK, reply=f"_INBOX_{self.attacker}.x.1")
                await attacker.settle()
                heard = await other.settle()
            else:
                attacker.subscribe(self.subject, queue=self.queue)
                await attacker.settle()
                other.publish(self.others_subject, MARK, reply=f"_INBOX_{self.other}.x.1")
                await other.settle()
                assert other.errors == []
                heard = await attacker.settle()
            return any(message.data == MARK for message in heard)

    def unprotected(self, mode: str, access: Access) -> Access:
        """The configuration without what stops it: a permission, and where there is one the account of its own."""
        if mode == "accounts" and self.attacker in TRAINERS:
            return access.changed(move_beside, access.public_key(self.attacker), access.public_key(self.home))
        subject = f"{self.subject} {self.queue}".strip()
        permitted = access.changed(permit, access.public_key(self.attacker), self.action, subject)
        if mode == "accounts" and self.home in TRAINERS:
            return permitted.changed(move_beside, access.public_key(self.attacker), access.public_key(self.home))
        return permitted


def _publishing() -> list[Overstep]:
    inbox, found = "_INBOX_bob.x.1", []

    def attack(kind: str, attackers: str, subject: str, other: str, others_subject: str, **more: str) -> None:
        for attacker in attackers.split():
            found.append(Overstep(kind, attacker, "publish", subject, other, others_subject, **more))

    attack("forging a reply", "alice", inbox, "bob", "_INBOX_bob.>", home="bob")
    attack("spoofing a result", "op ctl2 dash", inbox, "bob", "_INBOX_bob.>", home="bob")
    work = {"others_queue": "workers"}
    attack("submitting work as a server", "srv2", "env.stage.rollout", "srv", "env.*.rollout", **work)
    attack("submitting work as an operator", "op ctl2 dash", "env.stage.rollout", "srv", "env.*.rollout", **work)
    attack("work for an env of others", "carol", "env.stage.rollout", "srv", "env.*.rollout", **work)
    attack("a word to a server", "srv2 op ctl2 dash carol", "env.stage.server.s1", "srv", "env.*.server.*")
    attack("draining", "alice srv2 dash", "env.stage.ctl.all", "srv", "env.*.ctl.*")
    attack("ordering controllers about", "alice srv2 ctl2 dash", "envctl.ctl1", "ctl1", "envctl.ctl1")
    attack("spoofing a heartbeat", "alice op ctl2 dash mathsrv", "env.stage.beat.s1", "ctl1", "env.*.beat.*")
    attack("spoofing a controller's heartbeat", "alice srv2 op ctl2 dash", "envctl.beat.ctl1", "ctl1", "envctl.beat.*")
    attack("telling that a server is gone", "alice srv2 op dash", "env.stage.gone", "op", "env.*.gone")
    attack("asking all services", "alice dash", "$SRV.PING", "srv", "$SRV.>")
    return found


def _subscribing() -> list[Overstep]:
    found = []

    def attack(kind: str, attackers: str, subject: str, other: str, others_subject: str, **more: str) -> None:
        for attacker in attackers.split():
            found.append(Overstep(kind, attacker, "subscribe", subject, other, others_subject, **more))

    for subject in ("_INBOX_bob.>", "_INBOX_bob.*.*", ">", "*.>"):
        attack("reading an inbox", "alice", subject, "bob", "_INBOX_bob.x.1", home="bob")
    attack("reading an inbox", "alice", "_INBOX_bob.>", "bob", "_INBOX_bob.x.1", queue="workers", home="bob")
    attack("reading an inbox", "srv2 op ctl2 dash", "_INBOX_bob.>", "bob", "_INBOX_bob.x.1", home="bob")
    work = "env.stage.rollout"
    attack("acting as a server", "alice op dash ctl2", "env.*.rollout", "bob", work, queue="workers")
    attack("acting as a server", "mathsrv", "env.stage.rollout", "bob", work, queue="workers")
    attack("acting as a server", "alice", "env.*.server.*", "bob", "env.stage.server.s1")
    attack("listening to the work of others", "alice srv2 op dash ctl2", "env.*.rollout", "bob", work)
    attack("listening to the work of others", "srv2", "env.*.rollout", "bob", work, queue="spies")
    attack("listening to the work of others", "mathsrv op dash", "env.*.server.*", "bob", "env.stage.server.s1")
    attack("listening to the work of others", "mathsrv", "env.stage.server.*", "bob", "env.stage.server.s1")
    attack("listening to orders", "alice dash", "env.*.ctl.*", "op", "env.stage.ctl.all")
    attack("listening to orders", "alice srv2 ctl2", "envctl.*", "op", "envctl.ctl1")
    return found


_ALL = [*_publishing(), *_subscribing()]
OVERSTEPS = {kind: [overstep for overstep in _ALL if overstep.kind == kind] for kind in {each.kind: 0 for each in _ALL}}
"""By kind."""
