"""Who holds a job, and what silence means: DESIGN 5 and 6 (CASES P12, P14)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.client.attempts import Attempts, CancelOn, Collect, Instruction, Lost, Resend

STALL_S = 30.0
NOW = 100.0


def make(max_attempts: int = 3) -> Attempts:
    return Attempts(max_attempts=max_attempts, stall_timeout_s=STALL_S)


def on(*servers: str, job: str = "j") -> Attempts:
    """A job that the first server accepted, and each next one when those before had stalled."""
    attempts = make()
    attempts.start(job)
    attempts.accepted(job, servers[0], NOW)
    for number, server in enumerate(servers[1:], 1):
        attempts.tick(NOW + number * STALL_S)
        attempts.accepted(job, server, NOW + number * STALL_S)
    return attempts


def is_empty(attempts: Attempts) -> bool:
    return len(attempts) == 0 and attempts.holders() == {}


def test_a_job_from_start_to_result_leaves_nothing() -> None:
    attempts = on("s1")
    assert attempts.holders() == {"s1": ("j",)}
    assert attempts.attempt("j") == 1
    assert attempts.finish("j", "s1") == []
    assert is_empty(attempts)


def test_an_acceptance_that_comes_twice_changes_nothing() -> None:
    attempts = on("s1")
    assert attempts.accepted("j", "s1", NOW + 1) == []
    assert attempts.holders() == {"s1": ("j",)}


def test_a_late_acceptance_is_cancelled_when_the_job_is_elsewhere() -> None:
    attempts = on("s1")
    assert attempts.accepted("j", "s2", NOW) == [CancelOn("s2", ("j",))]
    assert attempts.holders() == {"s1": ("j",)}


def test_a_late_acceptance_is_cancelled_when_the_job_is_over() -> None:
    """CASES P12: the revived copy is told to stop."""
    attempts = on("s1")
    attempts.finish("j", "s1")
    assert attempts.accepted("j", "s2", NOW) == [CancelOn("s2", ("j",))]
    assert is_empty(attempts)


def test_giving_a_job_up_cancels_it_wherever_it_is() -> None:
    attempts = on("s1", "s2")
    assert attempts.finish("j", None) == [CancelOn("s1", ("j",)), CancelOn("s2", ("j",))]
    assert is_empty(attempts)


def test_finishing_the_unknown_is_harmless() -> None:
    assert make().finish("j", "s1") == []


# ---- checks


def test_a_result_that_was_not_seen_is_collected() -> None:
    assert on("s1").status("s1", done=["j"], unknown=[], now=NOW) == [Collect("j", "s1")]


def test_a_job_that_its_server_does_not_know_is_sent_again() -> None:
    attempts = on("s1")
    (resend,) = attempts.status("s1", done=[], unknown=["j"], now=NOW)
    assert isinstance(resend, Resend)
    assert "no longer knew" in resend.reason
    assert attempts.attempt("j") == 2
    assert attempts.holders() == {}


@pytest.mark.parametrize("answer", [{"done": ["j"], "unknown": []}, {"done": [], "unknown": ["j"]}])
def test_a_status_from_a_server_that_does_not_hold_the_job_is_ignored(answer: dict[str, list[str]]) -> None:
    attempts = on("s1")
    assert attempts.status("s2", **answer, now=NOW) == []
    attempts.finish("j", "s1")
    assert attempts.status("s1", **answer, now=NOW) == []


# ---- servers that are gone


def test_the_jobs_of_a_server_that_is_gone_are_sent_again_at_once() -> None:
    attempts = make()
    for job in ("a", "b"):
        attempts.start(job)
        attempts.accepted(job, "s1", NOW)
    resends = attempts.gone("s1")
    assert [(type(i), i.job) for i in resends] == [(Resend, "a"), (Resend, "b")]  # type: ignore[union-attr]
    assert attempts.holders() == {}
    assert attempts.gone("s1") == []
    assert attempts.accepted("a", "s2", NOW) == []


def test_attempts_are_bounded() -> None:
    attempts = on("s1")
    for server in ("s2", "s3"):
        (resend,) = attempts.gone({"s2": "s1", "s3": "s2"}[server])
        assert isinstance(resend, Resend)
        attempts.accepted("j", server, NOW)
    assert attempts.history("j") == ("server s1 is gone", "server s2 is gone")
    (lost,) = attempts.gone("s3")
    assert isinstance(lost, Lost)
    assert (lost.job, lost.attempts) == ("j", 3)
    assert all(f"server {server} is gone" in lost.reason for server in ("s1", "s2", "s3"))
    assert attempts.finish("j", None) == []
    assert is_empty(attempts)


def test_a_result_that_could_not_be_collected_sends_the_job_again() -> None:
    attempts = on("s1")
    assert attempts.outcome_lost("j", "s2", "never mind") == []
    assert attempts.outcome_lost("j", "s1", "too old") == [Resend("j", "too old")]
    assert attempts.outcome_lost("j", "s1", "too old") == []


# ---- servers that stall


def test_a_stalled_server_is_not_dead_its_jobs_are_sent_again_once() -> None:
    attempts = on("s1")
    assert attempts.tick(NOW + STALL_S - 0.1) == []
    (resend,) = attempts.tick(NOW + STALL_S)
    assert isinstance(resend, Resend)
    assert "gave no answer for 30 s" in resend.reason
    assert attempts.tick(NOW + 2 * STALL_S) == []
    assert attempts.holders() == {"s1": ("j",)}


@pytest.mark.parametrize("sign", ["heard", "status", "accepted"])
def test_any_answer_ends_the_silence(sign: str) -> None:
    attempts = on("s1")
    if sign == "heard":
        attempts.heard("s1", NOW + 20)
    elif sign == "status":
        attempts.status("s1", done=[], unknown=[], now=NOW + 20)
    else:
        attempts.accepted("j", "s1", NOW + 20)
    assert attempts.tick(NOW + 49) == []
    assert len(attempts.tick(NOW + 50)) == 1


def test_a_new_job_on_a_stalled_server_that_answers_is_heard() -> None:
    attempts = on("s1")
    attempts.start("new")
    attempts.accepted("new", "s1", NOW + 29)
    assert attempts.tick(NOW + STALL_S) == []


def test_the_first_result_wins_and_the_other_attempt_is_cancelled() -> None:
    """CASES P12."""
    attempts = on("s1", "s2")
    assert attempts.holders() == {"s1": ("j",), "s2": ("j",)}
    assert attempts.is_awaited_from("j", "s1")
    assert attempts.finish("j", "s1") == [CancelOn("s2", ("j",))]
    assert is_empty(attempts)


def test_a_stalled_copy_that_is_lost_costs_nothing_while_another_runs() -> None:
    attempts = on("s1", "s2")
    assert attempts.gone("s1") == []
    assert attempts.attempt("j") == 2
    assert attempts.gone("s2") != []


def test_a_stalled_copy_that_is_lost_before_the_next_acceptance_is_not_sent_a_third_time() -> None:
    attempts = on("s1")
    attempts.tick(NOW + STALL_S)
    assert attempts.gone("s1") == []
    assert attempts.accepted("j", "s2", NOW + STALL_S) == []
    assert attempts.attempt("j") == 2


def test_a_job_is_given_up_once_when_all_its_servers_stall() -> None:
    attempts = on("s1", "s2", "s3")
    said = attempts.tick(NOW + 3 * STALL_S) + attempts.tick(NOW + 4 * STALL_S)
    assert [type(instruction) for instruction in said] == [Lost]


def test_while_the_client_is_cut_off_no_server_stalls() -> None:
    attempts = on("s1")
    attempts.shift_clocks(1000.0)
    assert attempts.tick(NOW + 1000 + STALL_S - 0.1) == []
    assert len(attempts.tick(NOW + 1000 + STALL_S)) == 1


@pytest.mark.parametrize(
    ("server", "awaited"), [("s1", True), ("s2", False)], ids=["its holder", "another server while it is held"]
)
def test_whose_word_counts(server: str, awaited: bool) -> None:
    assert on("s1").is_awaited_from("j", server) is awaited


def test_any_servers_word_counts_while_nobody_holds_the_job() -> None:
    attempts = make()
    attempts.start("j")
    assert attempts.is_awaited_from("j", "s9")
    assert not attempts.is_awaited_from("unknown", "s9")


class AttemptsMachine(RuleBasedStateMachine):
    """Jobs and servers at random: nobody is forgotten, and all ends leave nothing."""

    SERVERS = st.sampled_from(["s1", "s2", "s3"])
    JOBS = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.attempts = make()
        self.now = NOW
        self.live: set[str] = set()
        self.out: set[str] = set()
        """Jobs that are on their way to a server."""
        self.resends: dict[str, int] = {}

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Resend(job=job):
                    assert job in self.live
                    assert job not in self.out, "never twice on its way"
                    self.out.add(job)
                    self.resends[job] += 1
                    assert self.resends[job] == self.attempts.attempt(job) - 1 < 3
                case Lost(job=job):
                    self.end(job, None)
                case CancelOn(server=server, jobs=(job,)):
                    assert job not in self.attempts.holders().get(server, ())
                case Collect(job=job, server=server):
                    assert job in self.attempts.holders()[server]

    def end(self, job: str, server: str | None) -> None:
        self.live.remove(job)
        self.out.discard(job)
        self.obey(self.attempts.finish(job, server))
        assert all(job not in jobs for jobs in self.attempts.holders().values())

    @rule(job=JOBS)
    def start(self, job: str) -> None:
        if job not in self.live:
            self.attempts.start(job)
            self.live.add(job)
            self.out.add(job)
            self.resends[job] = 0

    @rule(job=JOBS, server=SERVERS)
    def accept(self, job: str, server: str) -> None:
        holders = {name for name, jobs in self.attempts.holders().items() if job in jobs}
        instructions = self.attempts.accepted(job, server, self.now)
        if job in self.live and (job in self.out or server in holders):
            assert instructions == []
            self.out.discard(job)
        else:
            assert instructions == [CancelOn(server, (job,))]
        self.obey(instructions)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), server=st.one_of(st.none(), SERVERS))
    def finish(self, data: st.DataObject, server: str | None) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.live))), server)

    @rule(server=SERVERS, done=st.sets(JOBS), unknown=st.sets(JOBS))
    def status(self, server: str, done: set[str], unknown: set[str]) -> None:
        self.obey(self.attempts.status(server, done=sorted(done), unknown=sorted(unknown - done), now=self.now))

    @rule(server=SERVERS)
    def gone(self, server: str) -> None:
        self.obey(self.attempts.gone(server))
        assert server not in self.attempts.holders()

    @rule(seconds=st.sampled_from([1.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.attempts.tick(self.now))

    @invariant()
    def every_job_is_held_or_on_its_way(self) -> None:
        held = {job for jobs in self.attempts.holders().values() for job in jobs}
        assert held | self.out == self.live
        assert len(self.attempts) == len(self.live)
        assert all(self.attempts.holders().values())

    def teardown(self) -> None:
        for job in sorted(self.live):
            self.end(job, None)
        assert is_empty(self.attempts)


TestAttemptsMachine = AttemptsMachine.TestCase
TestAttemptsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
