"""Who gets a server's slots, and what is held back while memory is short (CASES P15, P31, P33, P52)."""

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


# ---- while memory is short


def hold_back(slots: Slots, *clients: str, is_full: bool = False) -> list[Instruction]:
    return slots.hold_back(is_full=is_full, clients=frozenset(clients), now=0.0)


def test_while_results_take_all_their_memory_nothing_is_taken() -> None:
    """P33: credits go, nobody is granted anything, pushes are refused; then all comes back."""
    slots = make(2)
    assert hold_back(slots, is_full=True) == [WithdrawCredits()]
    assert hold_back(slots, is_full=True) == []
    assert slots.push("late", 1, 0.0) == (False, [])
    assert slots.credits_gone(0.0) == []
    assert wait(slots, "a", 1) == []
    assert slots.redeem("1", "a", "job", 1, 0.0) == (False, [])
    assert slots.is_short_of_memory
    assert [grant.client for grant in grants(hold_back(slots))] == ["a"]
    assert slots.credits == 1, "what nobody waits for is open to all"


def test_a_grant_that_was_given_before_memory_was_short_is_refused() -> None:
    slots, instructions = waiting(1, a=1)
    (grant,) = grants(instructions)
    hold_back(slots, is_full=True)
    assert slots.redeem(grant.grant, "a", "job", 1, 0.0) == (False, [])


def test_a_client_that_uses_too_much_is_held_back_and_others_are_not() -> None:
    slots = make(2)
    assert hold_back(slots, "slow") == []
    assert slots.push("its", 1, 0.0, client="slow")[0] is False
    assert slots.push("ours", 1, 0.0, client="quick")[0] is True
    assert wait(slots, "slow", 5) == []
    assert slots.credits > 0, "credits stay open while only those wait that are held back"
    slots.release("ours", 0.0)
    (withdraw,) = wait(slots, "quick", 1)
    assert isinstance(withdraw, WithdrawCredits)
    assert [grant.client for grant in grants(slots.credits_gone(0.0))] == ["quick"]
    assert [grant.client for grant in grants(hold_back(slots))] == []
    assert [grant.client for grant in grants(slots.credits_gone(0.0))] == ["slow"]


def test_inputs_have_a_budget() -> None:
    """P33: the sum of what runs and comes in; one more may start while it is under the budget."""
    slots = Slots(4, grant_ttl_s=GRANT_TTL_S, wait_ttl_s=WAIT_TTL_S, max_inputs_bytes=100)
    slots.open()
    assert slots.push("1", 1, 0.0, client="a", input_bytes=99)[0] is True
    assert slots.push("2", 1, 0.0, client="b", input_bytes=99) == (True, [WithdrawCredits()])
    assert slots.push("3", 1, 0.0, client="c", input_bytes=1)[0] is False
    slots.credits_gone(0.0)
    assert (slots.inputs_bytes, slots.is_short_of_memory) == (198, True)
    assert slots.release("1", 0.0) == [AddCredits(3)]
    assert slots.release("1", 0.0) == []
    assert (slots.inputs_bytes, slots.in_flight) == (99, 1)


def test_a_client_whose_inputs_take_half_of_their_memory_is_held_back_alone() -> None:
    """P33: eight uploads that are announced and never come must not refuse everybody else."""
    slots = Slots(64, grant_ttl_s=GRANT_TTL_S, wait_ttl_s=WAIT_TTL_S, max_inputs_bytes=2 * 2**30)
    slots.open()
    uploads = [slots.push(str(n), 1, 0.0, client="greedy", input_bytes=2**28 + 128)[0] for n in range(8)]
    assert uploads == [True] * 4 + [False] * 4
    assert not slots.is_short_of_memory
    assert slots.push("ours", 1, 0.0, client="other", input_bytes=2**28)[0] is True
    assert grants(wait(slots, "greedy", 4) + slots.credits_gone(0.0)) == []
    assert slots.credits > 0, "credits stay open while only those wait that are held back"
    assert [grant.client for grant in grants(slots.release("0", 0.0))] == ["greedy"], "its turn has come"
    for job in ("1", "2", "3", "ours"):
        slots.release(job, 0.0)
    assert (slots.inputs_bytes, slots._inputs, slots._heavy) == (0, {}, set())


class SlotsMachine(RuleBasedStateMachine):
    """Random events, with nats-server's side of the credits modelled."""

    CLIENTS = st.sampled_from(["a", "b", "c"])
    INPUTS = st.sampled_from([0, 10, 40, 150])

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 5
        self.slots = Slots(self.capacity, grant_ttl_s=GRANT_TTL_S, wait_ttl_s=WAIT_TTL_S, max_inputs_bytes=100)
        self.now = 100.0
        self.is_full = False
        self.slow: frozenset[str] = frozenset()
        self.inputs: dict[str, int] = {}
        self.owners: dict[str, str] = {}
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
                    assert not self.is_short
                    assert not self.somebody_waits, "no credits while somebody waits"
                    assert not self.withdrawing
                    self.credits += count
                case WithdrawCredits():
                    assert not self.withdrawing
                    self.withdrawing = True
                case SendGrant(client=client, grant=grant):
                    assert self.open
                    assert grant not in self.granted
                    assert not self.is_short
                    assert client not in self.held_back
                    self.granted[grant] = client

    @property
    def is_short(self) -> bool:
        return self.is_full or sum(self.inputs.values()) >= 100

    @property
    def held_back(self) -> frozenset[str]:
        shares = Counter[str]()
        for job, size_bytes in self.inputs.items():
            shares[self.owners[job]] += size_bytes
        return self.slow | {client for client, size_bytes in shares.items() if size_bytes >= 50}

    @property
    def somebody_waits(self) -> bool:
        return self.slots.line.has_turn(without=self.held_back)

    def admit(self, result: tuple[bool, list[Instruction]], job: str, size: int, client: str, taken: int) -> None:
        admitted, instructions = result
        if admitted:
            assert self.open
            assert not self.is_short
            assert client not in self.held_back
            self.inputs[job], self.owners[job] = taken, client
            assert sum(self.running.values()) < self.capacity, "a job starts only on a free slot"
            self.running[job] = size
        self.obey(instructions)

    def new_job(self) -> str:
        self.jobs += 1
        return f"job{self.jobs}"

    @rule(client=CLIENTS, jobs=st.integers(0, 4), priority=st.integers(0, 1))
    def wait(self, client: str, jobs: int, priority: int) -> None:
        self.obey(wait(self.slots, client, jobs, priority=priority, now=self.now))

    @rule(is_full=st.booleans(), clients=st.frozensets(CLIENTS, max_size=2))
    def hold_back(self, is_full: bool, clients: frozenset[str]) -> None:
        self.is_full, self.slow = is_full, clients
        self.obey(self.slots.hold_back(is_full=is_full, clients=clients, now=self.now))

    @precondition(lambda self: self.credits > 0)
    @rule(client=CLIENTS, size=st.sampled_from([1, 1, 1, 3, 8]), taken=INPUTS)
    def push(self, client: str, size: int, taken: int) -> None:
        self.credits -= 1
        job = self.new_job()
        result = self.slots.push(job, size, self.now, client=client, input_bytes=taken)
        self.admit(result, job, size, client, taken)

    @rule(client=CLIENTS, taken=INPUTS)
    def push_beyond_the_credits(self, client: str, taken: int) -> None:
        job = self.new_job()
        self.credits = max(0, self.credits - 1)
        result = self.slots.push(job, 1, self.now, client=client, input_bytes=taken)
        self.admit(result, job, 1, client, taken)

    @precondition(lambda self: self.credits > 0)
    @rule()
    def bounce(self) -> None:
        self.credits -= 1
        self.obey(self.slots.bounce(self.now))

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), size=st.sampled_from([1, 1, 1, 3, 8]), taken=INPUTS)
    def redeem(self, data: st.DataObject, size: int, taken: int) -> None:
        grant = data.draw(st.sampled_from(sorted(self.granted)))
        job, client = self.new_job(), self.granted[grant]
        result = self.slots.redeem(grant, client, job, size, self.now, input_bytes=taken)
        self.admit(result, job, size, client, taken)
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
        del self.running[job], self.inputs[job]
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
        assert self.slots.inputs_bytes == sum(self.inputs.values()) < 100 + 150
        assert self.slots.is_short_of_memory == self.is_short
        # A group may start while credits and grants are out: these are then refused as busy.
        assert promised - overrun <= self.capacity
        assert 0 <= self.slots.credits == self.credits

    @invariant()
    def no_slot_is_idle_while_somebody_waits(self) -> None:
        if self.open and not self.is_short and self.somebody_waits and self.slots.free > 0:
            raise AssertionError("a free slot was not granted")

    @invariant()
    def no_slot_is_idle_while_nobody_waits(self) -> None:
        is_open = self.open and not self.is_short and not self.withdrawing
        if is_open and not self.somebody_waits and self.slots.free > 0:
            assert self.slots.credits > self.slots.free

    @invariant()
    def credits_come_back_while_somebody_waits(self) -> None:
        if (self.somebody_waits or self.is_short or not self.open) and self.slots.credits:
            assert self.withdrawing

    def teardown(self) -> None:
        for job in list(self.running):
            del self.inputs[job]
            self.obey(self.slots.release(job, self.now))
        self.running.clear()
        self.is_full, self.slow = False, frozenset()
        self.obey(hold_back(self.slots))
        self.obey(self.slots.tick(self.now + 100))
        self.lost_subscription()
        assert self.slots.in_flight == 0
        assert self.slots.free == (0 if self.open else self.capacity)
        assert len(self.slots.line) == 0


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
