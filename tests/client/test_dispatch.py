"""Which jobs go out, and how: DESIGN 4 and 6 (CASES P14, P15)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.client.dispatch import Dispatch, Instruction, PassGrant, Push, SayWaiting, UseGrant

ACCEPT_TIMEOUT_S = 1.5
WAIT_REPEAT_S = 2.0
NOW = 100.0


def make(max_unaccepted: int = 8) -> Dispatch:
    return Dispatch(
        max_unaccepted=max_unaccepted, accept_timeout_s=ACCEPT_TIMEOUT_S, wait_repeat_s=WAIT_REPEAT_S, regrow_s=0.02
    )


def in_line(jobs: int) -> Dispatch:
    """A client in the waiting line with jobs 0, 1, ... waiting; all servers know of all of them."""
    dispatch = make(max_unaccepted=1)
    for number in range(jobs):
        dispatch.submit(str(number), NOW)
    assert dispatch.refused("0", NOW) == [SayWaiting(jobs)]
    return dispatch


def test_jobs_are_pushed_a_few_unaccepted_at_a_time() -> None:
    dispatch = make(max_unaccepted=2)
    assert dispatch.submit("a", NOW) == [Push("a")]
    assert dispatch.submit("b", NOW) == [Push("b")]
    assert dispatch.submit("c", NOW) == []
    assert dispatch.accepted("a", NOW) == [Push("c")]
    assert dispatch.pending() == ["b", "c"]


@pytest.mark.parametrize("also_in_flight", [0, 3])
def test_a_refusal_ends_pushing_and_joins_the_line(also_in_flight: int) -> None:
    """503 and busy are told alike."""
    dispatch = make()
    for number in range(1 + also_in_flight):
        dispatch.submit(str(number), NOW)
    assert dispatch.refused("0", NOW) == [SayWaiting(1)]
    assert dispatch.waiting_in_line
    assert dispatch.submit("next", NOW) == []


def test_further_refusals_are_told_together_soon_after() -> None:
    dispatch = make()
    for number in range(4):
        dispatch.submit(str(number), NOW)
    dispatch.refused("0", NOW)
    assert [dispatch.refused(str(number), NOW + 0.001) for number in (1, 2, 3)] == [[], [], []]
    assert dispatch.tick(NOW + 0.1) == [SayWaiting(4)]


def test_a_refusal_of_a_job_that_is_not_out_is_ignored() -> None:
    dispatch = make()
    dispatch.submit("a", NOW)
    dispatch.accepted("a", NOW)
    assert dispatch.refused("a", NOW) == []
    assert not dispatch.waiting_in_line


def test_a_grant_is_used_for_the_job_that_waits_longest() -> None:
    dispatch = in_line(3)
    assert dispatch.granted("s1", "g1", NOW) == [UseGrant("0", "s1", "g1")]
    assert dispatch.granted("s2", "g7", NOW) == [UseGrant("1", "s2", "g7")]


def test_a_grant_with_nothing_waiting_is_passed() -> None:
    dispatch = in_line(1)
    dispatch.granted("s1", "g1", NOW)
    assert dispatch.granted("s2", "g2", NOW) == [PassGrant("s2", "g2")]
    assert make().granted("s1", "g1", NOW) == [PassGrant("s1", "g1")]


def test_a_grant_may_come_while_jobs_are_pushed() -> None:
    dispatch = make(max_unaccepted=1)
    dispatch.submit("a", NOW)
    dispatch.submit("b", NOW)
    assert dispatch.granted("s", "g", NOW) == [UseGrant("b", "s", "g")]


def test_a_refused_grant_puts_the_job_first_again() -> None:
    dispatch = in_line(3)
    dispatch.granted("s1", "g1", NOW)
    dispatch.refused("0", NOW)
    assert dispatch.granted("s2", "g2", NOW) == [UseGrant("0", "s2", "g2")]


def test_the_line_is_left_when_all_is_accepted_and_then_jobs_are_pushed() -> None:
    dispatch = in_line(1)
    dispatch.granted("s1", "g1", NOW)
    assert dispatch.waiting_in_line
    assert dispatch.accepted("0", NOW) == [SayWaiting(0)]
    assert dispatch.submit("next", NOW) == [Push("next")]


def test_a_waiting_client_repeats_itself() -> None:
    dispatch = in_line(2)
    assert dispatch.tick(NOW + 1.9) == []
    assert dispatch.tick(NOW + 2.0) == [SayWaiting(2)]
    assert dispatch.tick(NOW + 2.1) == []
    assert dispatch.tick(NOW + 4.0) == [SayWaiting(2)]


def test_a_backlog_that_doubled_is_told_at_once() -> None:
    dispatch = in_line(1)
    said = [dispatch.submit(f"new{number}", NOW + 0.1 * number) for number in range(6)]
    assert said == [[], [SayWaiting(3)], [], [], [], [SayWaiting(7)]]


def test_a_job_that_comes_after_every_known_one_was_granted_is_told_at_once() -> None:
    """Servers count grants down: at 0 they think that nobody waits (found by the simulation)."""
    dispatch = in_line(2)
    dispatch.granted("s", "g1", NOW)
    dispatch.granted("s", "g2", NOW)
    assert dispatch.submit("new", NOW + 0.1) == [SayWaiting(1)]


def test_a_job_that_comes_after_a_passed_grant_is_told_at_once() -> None:
    """The server that got its grant back took this client off its line (found by the simulation)."""
    dispatch = in_line(5)
    for number in range(5):
        dispatch.granted("s", f"g{number}", NOW)
    dispatch.granted("other", "g", NOW)
    assert dispatch.submit("new", NOW + 0.1) == [SayWaiting(1)]


def test_an_unaccepted_push_goes_to_the_line_as_its_server_may_hang() -> None:
    """CASES P14: a hanging server keeps its credits and would swallow push after push."""
    dispatch = make(max_unaccepted=2)
    for job in "abc":
        dispatch.submit(job, NOW)
    assert dispatch.tick(NOW + 1.4) == []
    assert dispatch.tick(NOW + 1.5) == [SayWaiting(3)]
    assert dispatch.pending() == ["a", "b", "c"]


def test_an_unaccepted_granted_job_waits_again() -> None:
    dispatch = in_line(1)
    dispatch.granted("s1", "g1", NOW)
    assert dispatch.tick(NOW + 1.5) == [SayWaiting(1)]
    assert dispatch.granted("s2", "g2", NOW + 1.6) == [UseGrant("0", "s2", "g2")]


def test_a_resent_job_goes_first() -> None:
    dispatch = in_line(2)
    dispatch.resend("lost", NOW)
    assert dispatch.granted("s", "g", NOW) == [UseGrant("lost", "s", "g")]
    assert make().resend("lost", NOW) == [Push("lost")]


def test_a_removed_job_is_not_sent() -> None:
    dispatch = in_line(2)
    assert dispatch.remove("0", NOW) == []
    assert dispatch.granted("s", "g", NOW) == [UseGrant("1", "s", "g")]
    assert dispatch.remove("unknown", NOW) == []


def test_removing_the_last_waiting_job_leaves_the_line() -> None:
    assert in_line(1).remove("0", NOW) == [SayWaiting(0)]


def test_nothing_is_sent_while_disconnected() -> None:
    dispatch = make()
    dispatch.disconnected()
    assert dispatch.submit("a", NOW) == []
    assert dispatch.tick(NOW + 100) == []
    assert dispatch.granted("s", "g", NOW) == [PassGrant("s", "g")]
    assert dispatch.reconnected(NOW + 100) == [Push("a")]


def test_after_an_outage_what_was_sent_gets_its_time_again() -> None:
    """Whether it arrived is unknown; an accept may still come."""
    dispatch = make()
    dispatch.submit("a", NOW)
    dispatch.disconnected()
    assert dispatch.reconnected(NOW + 100) == []
    assert dispatch.tick(NOW + 101.4) == []
    assert dispatch.tick(NOW + 101.5) == [SayWaiting(1)]


def test_after_an_outage_a_waiting_client_says_so_again() -> None:
    dispatch = in_line(2)
    dispatch.disconnected()
    assert dispatch.reconnected(NOW + 0.5) == [SayWaiting(2)]


class DispatchMachine(RuleBasedStateMachine):
    """Every unaccepted job is in exactly one place, and goes out only by the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatch = make(max_unaccepted=3)
        self.now = NOW
        self.queued: set[str] = set()
        self.sent: set[str] = set()
        self.count = 0
        self.connected = True
        self.server_count = 0
        """What the server that granted most still counts of this client's waiting jobs."""

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Push(job=job):
                    assert not self.dispatch.waiting_in_line
                    self.go(job)
                    assert len(self.sent) <= 3
                case UseGrant(job=job):
                    self.go(job)
                case SayWaiting(jobs=jobs):
                    assert jobs == len(self.queued)
                    self.server_count = jobs
                case PassGrant():
                    assert not self.queued or not self.connected
                    self.server_count = 0

    def go(self, job: str) -> None:
        assert self.connected
        self.queued.remove(job)
        self.sent.add(job)

    @rule()
    def submit(self) -> None:
        self.count += 1
        self.queued.add(str(self.count))
        self.obey(self.dispatch.submit(str(self.count), self.now))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), accepted=st.booleans())
    def answer(self, data: st.DataObject, accepted: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.sent)))
        self.sent.remove(job)
        if accepted:
            self.obey(self.dispatch.accepted(job, self.now))
        else:
            self.queued.add(job)
            self.obey(self.dispatch.refused(job, self.now))
            assert self.dispatch.waiting_in_line

    @rule()
    def resend(self) -> None:
        self.count += 1
        self.queued.add(str(self.count))
        self.obey(self.dispatch.resend(str(self.count), self.now))

    @precondition(lambda self: self.queued or self.sent)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.queued | self.sent)))
        self.queued.discard(job)
        self.sent.discard(job)
        self.obey(self.dispatch.remove(job, self.now))

    @rule()
    def grant(self) -> None:
        self.server_count = max(0, self.server_count - 1)
        self.obey(self.dispatch.granted("server", "grant", self.now))

    @rule()
    def outage(self) -> None:
        self.dispatch.disconnected()
        self.connected = False
        self.now += 10.0
        assert self.dispatch.tick(self.now) == []
        self.connected = True
        self.server_count = 0
        self.obey(self.dispatch.reconnected(self.now))

    @rule(seconds=st.sampled_from([0.1, 1.6, 2.1]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        before = list(self.sent)
        instructions = self.dispatch.tick(self.now)
        still_sent = set(self.dispatch._sent) - {i.job for i in instructions if isinstance(i, Push)}
        self.queued |= set(before) - still_sent
        self.sent &= still_sent
        self.obey(instructions)
        if self.queued:
            assert self.dispatch.waiting_in_line or len(self.sent) >= 3, "what waits is in the line or held back"
        if self.queued and self.dispatch.waiting_in_line:
            assert self.server_count > 0, "every server knows that something waits"

    @invariant()
    def every_job_is_in_one_place(self) -> None:
        pending = self.dispatch.pending()
        assert len(pending) == len(set(pending))
        assert set(pending) == self.queued | self.sent
        assert set(self.dispatch._sent) == self.sent

    def teardown(self) -> None:
        for job in sorted(self.queued | self.sent):
            self.queued.discard(job)
            self.sent.discard(job)
            self.obey(self.dispatch.remove(job, self.now))
        assert self.dispatch.pending() == []
        assert not self.dispatch.waiting_in_line


TestDispatchMachine = DispatchMachine.TestCase
TestDispatchMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
