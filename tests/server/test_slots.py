"""Who gets a server's slots (CASES P15, P31, P52)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.server.slots import AddCredits, Instruction, SendGrant, Slots, WithdrawCredits

GRANT_TTL_S = 2.0
WAIT_TTL_S = 10.0


def make(capacity: int) -> Slots:
    slots = Slots(capacity, grant_ttl_s=GRANT_TTL_S, wait_ttl_s=WAIT_TTL_S)
    assert slots.open() == [AddCredits(capacity)]
    return slots


def wait(slots: Slots, client: str, jobs: int, *, priority: int = 0, now: float = 0.0) -> list[Instruction]:
    return slots.wait(client, inbox=f"inbox.{client}", jobs=jobs, priority=priority, now=now)


def full(capacity: int) -> Slots:
    slots = make(capacity)
    for number in range(capacity):
        assert slots.push(f"job{number}", 1, 0.0) == (True, [])
    return slots


def waiting(capacity: int, **clients: int) -> tuple[Slots, list[Instruction]]:
    """Slots whose credits are withdrawn because these clients wait, and what followed."""
    slots = make(capacity)
    for client, jobs in clients.items():
        wait(slots, client, jobs)
    return slots, slots.credits_gone(0.0)


def grants(instructions: list[Instruction]) -> list[SendGrant]:
    return [instruction for instruction in instructions if isinstance(instruction, SendGrant)]


def test_every_slot_becomes_a_credit_when_nobody_waits() -> None:
    slots = make(4)
    assert (slots.credits, slots.free, slots.in_flight) == (4, 0, 0)


def test_nothing_is_taken_before_open() -> None:
    slots = Slots(2, grant_ttl_s=GRANT_TTL_S, wait_ttl_s=WAIT_TTL_S)
    assert wait(slots, "a", 3) == []
    assert slots.push("job", 1, 0.0) == (False, [])
    assert slots.redeem("1", "a", "job", 1, 0.0) == (False, [])


def test_a_push_beyond_the_capacity_is_refused() -> None:
    slots = full(2)
    assert slots.push("more", 1, 0.0) == (False, [])
    assert slots.in_flight == 2


def test_a_push_without_a_credit_is_taken_if_a_slot_is_free() -> None:
    slots = full(2)
    slots.release("job0", 1.0)
    slots.credits_gone(1.0)
    slots.credits = 0
    assert slots.push("surplus", 1, 1.0)[0]


def test_a_job_whose_cancelled_copy_still_cleans_up_is_refused() -> None:
    """CASES P12."""
    slots = make(2)
    slots.push("job", 1, 0.0)
    assert not slots.push("job", 1, 0.0)[0]
    assert slots.in_flight == 1


def test_a_freed_slot_becomes_a_credit_when_nobody_waits() -> None:
    assert full(1).release("job0", 1.0) == [AddCredits(1)]


def test_credits_are_added_in_batches_that_double() -> None:
    slots = full(8)
    added = [slots.release(f"job{number}", 1.0) for number in range(8)]
    assert added == [[AddCredits(1)], [AddCredits(1)], [], [AddCredits(2)], [], [], [], [AddCredits(4)]]


def test_a_freed_slot_goes_to_the_line_first() -> None:
    slots = full(1)
    assert wait(slots, "a", 2) == []
    (grant,) = slots.release("job0", 1.0)
    assert isinstance(grant, SendGrant)
    assert (grant.client, grant.inbox) == ("a", "inbox.a")
    assert slots.free == 0


def test_credits_are_withdrawn_once_when_somebody_waits() -> None:
    slots = make(2)
    assert wait(slots, "a", 1) == [WithdrawCredits()]
    assert wait(slots, "b", 1) == []
    assert [grant.client for grant in grants(slots.credits_gone(1.0))] == ["a", "b"]


def test_a_push_during_the_withdrawal_is_taken() -> None:
    slots = make(2)
    wait(slots, "a", 5)
    assert slots.push("late", 1, 0.0)[0]
    assert len(grants(slots.credits_gone(0.0))) == 1
    assert slots.in_flight + 1 == 2


def test_no_credits_while_a_withdrawal_is_under_way() -> None:
    slots = make(2)
    wait(slots, "a", 1)
    assert wait(slots, "a", 0) == []
    assert slots.credits_gone(0.0) == [AddCredits(2)]


def test_redeeming_takes_the_granted_slot() -> None:
    slots, instructions = waiting(1, a=1)
    (grant,) = grants(instructions)
    assert slots.redeem(grant.grant, "a", "job", 1, 0.0) == (True, [])
    assert (slots.in_flight, slots.free) == (1, 0)


def test_a_grant_of_another_client_is_not_used_up() -> None:
    slots, instructions = waiting(1, a=1)
    (grant,) = grants(instructions)
    assert not slots.redeem(grant.grant, "thief", "stolen", 1, 0.0)[0]
    assert slots.decline(grant.grant, "thief", 0.0) == []
    assert slots.redeem(grant.grant, "a", "job", 1, 0.0)[0]


def test_a_late_redeem_is_taken_only_if_a_slot_is_free() -> None:
    slots, instructions = waiting(1, a=1)
    (grant,) = grants(instructions)
    slots.tick(GRANT_TTL_S + 0.1)
    slots.push("other", 1, GRANT_TTL_S + 0.2)
    assert not slots.redeem(grant.grant, "a", "job", 1, GRANT_TTL_S + 0.3)[0]


def test_declining_frees_the_slot_and_takes_the_client_off_the_line() -> None:
    slots, instructions = waiting(1, a=5)
    assert slots.decline(grants(instructions)[0].grant, "a", 0.0) == [AddCredits(1)]
    assert len(slots.line) == 0


def test_an_unused_grant_comes_back_and_goes_on_to_the_next() -> None:
    slots, instructions = waiting(1, a=5, b=5)
    assert [grant.client for grant in grants(instructions)] == ["a"]
    wait(slots, "b", 5, now=1.5)
    assert slots.tick(GRANT_TTL_S - 0.1) == []
    assert [grant.client for grant in grants(slots.tick(GRANT_TTL_S + 0.1))] == ["b"]


def test_a_client_that_let_a_grant_lapse_in_silence_gets_no_other_until_it_speaks() -> None:
    slots, _ = waiting(1, dead=1000)
    assert slots.tick(GRANT_TTL_S + 0.1) == [AddCredits(1)]
    assert wait(slots, "dead", 1000, now=3.0) == [WithdrawCredits()]


def test_a_client_that_spoke_since_keeps_its_place_when_a_grant_lapses() -> None:
    slots, _ = waiting(1, a=5)
    wait(slots, "a", 5, now=1.0)
    assert [grant.client for grant in grants(slots.tick(GRANT_TTL_S + 0.1))] == ["a"]


def test_silent_clients_leave_the_line() -> None:
    slots = full(1)
    wait(slots, "a", 5)
    slots.tick(WAIT_TTL_S + 0.1)
    assert slots.release("job0", WAIT_TTL_S + 0.2) == [AddCredits(1)]


def test_priority_goes_first() -> None:
    slots = full(3)
    wait(slots, "low", 5)
    wait(slots, "high", 2, priority=1)
    served = [grants(slots.release(f"job{number}", 1.0))[0].client for number in range(3)]
    assert served == ["high", "high", "low"]


def test_a_bounced_message_gives_its_slot_back() -> None:
    slots = make(1)
    assert slots.bounce(0.0) == [AddCredits(1)]
    assert full(1).bounce(0.0) == []


def test_a_group_may_start_on_one_free_slot_and_nothing_more_until_it_is_back_under_the_limit() -> None:
    """CASES P31: groups count their rollouts; the limit is overrun by one group only."""
    slots = full(4)
    slots.release("job0", 0.0)
    assert slots.push("group", 8, 0.0) == (True, [])
    assert (slots.in_flight, slots.free) == (11, -7)
    assert not slots.push("group2", 8, 0.0)[0]
    assert wait(slots, "a", 5) == []
    for number in (1, 2, 3):
        assert slots.release(f"job{number}", 0.0) == []
    assert len(grants(slots.release("group", 0.0))) == 4


def test_close_stops_everything() -> None:
    slots = full(3)
    wait(slots, "a", 5)
    (grant,) = grants(slots.release("job0", 0.0))
    assert slots.close() == []
    assert (len(slots.line), slots.free) == (0, 1)
    assert not slots.redeem(grant.grant, "a", "job", 1, 0.0)[0]
    assert not slots.push("job", 1, 0.0)[0]
    assert wait(slots, "a", 5) == []
    assert slots.release("job1", 0.0) == slots.tick(1.0) == slots.credits_gone(1.0) == []


def test_close_withdraws_credits() -> None:
    slots = make(3)
    assert slots.close() == [WithdrawCredits()]
    assert slots.credits_gone(0.0) == []
    assert slots.credits == 0


def test_releasing_twice_or_the_unknown_is_harmless() -> None:
    slots = full(1)
    slots.release("job0", 0.0)
    assert slots.release("job0", 0.0) == slots.release("nobody", 0.0) == []


@pytest.mark.parametrize("backlogs", [{"a": 1000, "b": 1000}, {"a": 1000, "b": 40, "c": 500}])
def test_slots_are_shared_evenly_while_all_wait(backlogs: dict[str, int]) -> None:
    """CASES P15: the grants of clients that always wait differ by at most one."""
    slots, instructions = waiting(4, **backlogs)
    served: Counter[str] = Counter(dict.fromkeys(backlogs, 0))
    running: list[str] = []
    for number in range(100):
        for grant in grants(instructions):
            served[grant.client] += 1
            running.append(f"job{number}-{grant.grant}")
            slots.redeem(grant.grant, grant.client, running[-1], 1, 0.0)
        assert max(served.values()) - min(served.values()) <= 1
        instructions = slots.release(running.pop(0), 0.0)


class SlotsMachine(RuleBasedStateMachine):
    """Random events, with nats-server's side of the credits modelled."""

    CLIENTS = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 5
        self.slots = Slots(self.capacity, grant_ttl_s=GRANT_TTL_S, wait_ttl_s=WAIT_TTL_S)
        self.now = 100.0
        self.credits = 0
        self.withdrawing = False
        self.open = True
        self.running: dict[str, int] = {}
        self.granted: dict[str, str] = {}
        self.jobs = 0
        self.overrun = 0
        self.obey(self.slots.open())

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case AddCredits(count=count):
                    assert count > 0
                    assert self.open
                    assert len(self.slots.line) == 0, "no credits while somebody waits"
                    assert not self.withdrawing
                    self.credits += count
                case WithdrawCredits():
                    assert not self.withdrawing
                    self.withdrawing = True
                case SendGrant(client=client, grant=grant):
                    assert self.open
                    assert grant not in self.granted
                    self.granted[grant] = client

    def admit(self, result: tuple[bool, list[Instruction]], job: str, size: int) -> None:
        admitted, instructions = result
        if admitted:
            assert self.open
            assert sum(self.running.values()) < self.capacity, "a job starts only on a free slot"
            self.running[job] = size
        self.obey(instructions)

    def new_job(self) -> str:
        self.jobs += 1
        return f"job{self.jobs}"

    @rule(client=CLIENTS, jobs=st.integers(0, 4), priority=st.integers(0, 1))
    def wait(self, client: str, jobs: int, priority: int) -> None:
        self.obey(wait(self.slots, client, jobs, priority=priority, now=self.now))

    @precondition(lambda self: self.credits > 0)
    @rule(size=st.sampled_from([1, 1, 1, 3, 8]))
    def push(self, size: int) -> None:
        self.credits -= 1
        job = self.new_job()
        self.admit(self.slots.push(job, size, self.now), job, size)

    @rule()
    def push_beyond_the_credits(self) -> None:
        job = self.new_job()
        self.credits = max(0, self.credits - 1)
        self.admit(self.slots.push(job, 1, self.now), job, 1)

    @precondition(lambda self: self.credits > 0)
    @rule()
    def bounce(self) -> None:
        self.credits -= 1
        self.obey(self.slots.bounce(self.now))

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), size=st.sampled_from([1, 1, 1, 3, 8]))
    def redeem(self, data: st.DataObject, size: int) -> None:
        grant = data.draw(st.sampled_from(sorted(self.granted)))
        job = self.new_job()
        self.admit(self.slots.redeem(grant, self.granted[grant], job, size, self.now), job, size)
        del self.granted[grant]

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def decline(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(sorted(self.granted)))
        self.obey(self.slots.decline(grant, self.granted.pop(grant), self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[job]
        self.obey(self.slots.release(job, self.now))

    @precondition(lambda self: self.withdrawing)
    @rule()
    def withdrawn(self) -> None:
        self.lost_subscription()

    @rule()
    def lost_subscription(self) -> None:
        self.credits, self.withdrawing = 0, False
        self.obey(self.slots.credits_gone(self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.slots.tick(self.now))

    @precondition(lambda self: self.open)
    @rule(really=st.integers(0, 9))
    def close(self, really: int) -> None:
        if really == 0:
            self.open = False
            self.obey(self.slots.close())

    @invariant()
    def promises_fit_the_capacity(self) -> None:
        promised = self.slots.capacity - self.slots.free
        overrun = max((size - 1 for size in self.running.values()), default=0)
        assert self.slots.in_flight == sum(self.running.values()) <= self.capacity + overrun
        # A group may start while credits and grants are out: these are then refused as busy.
        assert promised - overrun <= self.capacity
        assert 0 <= self.slots.credits == self.credits

    @invariant()
    def no_slot_is_idle_while_somebody_waits(self) -> None:
        if self.open and len(self.slots.line) and self.slots.free > 0:
            raise AssertionError("a free slot was not granted")

    @invariant()
    def no_slot_is_idle_while_nobody_waits(self) -> None:
        if self.open and not len(self.slots.line) and not self.withdrawing and self.slots.free > 0:
            assert self.slots.credits > self.slots.free

    @invariant()
    def credits_come_back_while_somebody_waits(self) -> None:
        if (len(self.slots.line) or not self.open) and self.slots.credits:
            assert self.withdrawing

    def teardown(self) -> None:
        for job in list(self.running):
            self.obey(self.slots.release(job, self.now))
        self.running.clear()
        self.obey(self.slots.tick(self.now + 100))
        self.lost_subscription()
        assert self.slots.in_flight == 0
        assert self.slots.free == (0 if self.open else self.capacity)
        assert len(self.slots.line) == 0


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
