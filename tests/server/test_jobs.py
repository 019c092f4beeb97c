"""The job table: held results, their budget, and clients that fall silent (CASES P33)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.server.jobs import Expire, Forget, Instruction, Job, Jobs, JobState, LeaseLimits, Lose, Probe

START = 1000.0
LIMITS = LeaseLimits(
    probe_after_s=3.0, orphan_grace_s=10.0, orphan_timeout_s=300.0, hold_results_s=600.0, hold_results_bytes=1000
)


def add(jobs: Jobs, name: str, *, client: str = "c", now: float = START, plain: bool = False) -> Job:
    reply = f"inbox.{client}"
    job = Job(name, reply if plain else client, 1, 1, reply, now, plain=plain, state=JobState.RUNNING)
    jobs.add(job, now)
    return job


def holding(*sizes: int) -> Jobs:
    """Jobs 0, 1, ... that are done and hold results of these sizes."""
    jobs = Jobs(LIMITS)
    for number, size in enumerate(sizes):
        add(jobs, str(number))
        jobs.finish(str(number), f"result {number}", size, START + number)
    return jobs


def is_empty(jobs: Jobs) -> bool:
    return (len(jobs), jobs.held_count, jobs.held_bytes, jobs.unfinished(), jobs._leases) == (0, 0, 0, [], {})


def lapse(jobs: Jobs, *, start: float, end: float, gone: bool) -> list[Instruction]:
    """Tick each second; every probe finds the client gone, or there. Returns what else was said."""
    said: list[Instruction] = []
    now = start
    while now <= end:
        for instruction in jobs.tick(now):
            if isinstance(instruction, Probe):
                jobs.probe_answered(instruction.client, gone=gone, now=now)
            else:
                said.append(instruction)
        now += 1.0
    return said


def test_a_job_from_admission_to_release_leaves_nothing() -> None:
    jobs = Jobs(LIMITS)
    job = add(jobs, "1")
    assert jobs.unfinished() == [job]
    assert jobs.finish("1", "result", 400, START + 1) == (job, [])
    assert (job.state, job.outcome, jobs.held_bytes, jobs.held_count) == (JobState.DONE, "result", 400, 1)
    assert jobs.release(["1"], "c") == [Forget("1")]
    assert job.outcome is None
    assert is_empty(jobs)


def test_a_job_belongs_to_its_client() -> None:
    jobs = holding(10)
    assert jobs.owned("0", "thief") is None
    assert jobs.release(["0"], "thief") == []
    assert jobs.owned("0", "c") is jobs.get("0")


def test_an_end_that_nobody_wants_is_no_job() -> None:
    jobs = holding(10)
    assert jobs.finish("0", "again", 10, START) == (None, [])
    assert jobs.finish("unknown", "result", 10, START) == (None, [])
    assert jobs.held_bytes == 10


def test_a_plain_request_holds_nothing() -> None:
    jobs = Jobs(LIMITS)
    job = add(jobs, "1", plain=True)
    assert jobs.finish("1", "result", 400, START) == (job, [])
    assert is_empty(jobs)


def test_age_of_the_oldest_unfinished_job() -> None:
    jobs = holding(10)
    assert jobs.oldest_age_s(START + 50) == 0.0
    add(jobs, "new", now=START + 20)
    assert jobs.oldest_age_s(START + 50) == 30.0


# ---- the budget


def test_over_the_budget_the_oldest_results_are_lost() -> None:
    """CASES P33: reply caches have a byte bound."""
    jobs = holding(400, 400)
    add(jobs, "new")
    _, instructions = jobs.finish("new", "result", 500, START + 9)
    (lose,) = instructions
    assert isinstance(lose, Lose)
    assert lose.job == "0"
    jobs.replace_outcome("0", "lost", START + 9)
    assert (jobs.held_bytes, jobs.held_count) == (900, 3)
    assert jobs.get("0").outcome == "lost"  # type: ignore[union-attr]


def test_as_many_are_lost_as_it_takes_but_never_the_newest() -> None:
    jobs = holding(300, 300, 300)
    add(jobs, "huge")
    _, instructions = jobs.finish("huge", "result", 5000, START + 9)
    assert [lose.job for lose in instructions if isinstance(lose, Lose)] == ["0", "1", "2"]


def test_failures_take_no_memory_and_are_not_lost_for_the_budget() -> None:
    jobs = holding(0, 900)
    add(jobs, "new")
    _, instructions = jobs.finish("new", "result", 200, START + 9)
    assert [lose.job for lose in instructions if isinstance(lose, Lose)] == ["1"]


def test_a_result_that_is_not_collected_is_lost_then_forgotten() -> None:
    jobs = holding(400)
    jobs.heard("c", "", START + 599)
    assert jobs.tick(START + 599) == []
    jobs.heard("c", "", START + 600)
    (lose,) = jobs.tick(START + 600)
    assert isinstance(lose, Lose)
    jobs.replace_outcome("0", "lost", START + 600)
    assert jobs.held_bytes == 0
    jobs.heard("c", "", START + 1199)
    jobs.tick(START + 1199)
    assert jobs.held_count == 1
    jobs.heard("c", "", START + 1200)
    assert jobs.tick(START + 1200) == []
    assert is_empty(jobs)


def test_replacing_the_outcome_of_an_unknown_job_is_harmless() -> None:
    jobs = Jobs(LIMITS)
    jobs.replace_outcome("nobody", "lost", START)
    assert is_empty(jobs)


# ---- clients that fall silent


def test_a_client_that_speaks_is_not_probed() -> None:
    jobs = Jobs(LIMITS)
    add(jobs, "1")
    for second in range(1, 30):
        jobs.heard("c", "inbox.c", START + second)
        assert jobs.tick(START + second) == []


def test_a_silent_client_is_probed_at_its_last_inbox() -> None:
    jobs = Jobs(LIMITS)
    add(jobs, "1")
    jobs.heard("c", "inbox.new", START)
    jobs.heard("c", "", START)
    assert jobs.tick(START + 2.9) == []
    assert jobs.tick(START + 3) == [Probe("c", "inbox.new")]
    assert jobs.tick(START + 4) == []
    assert jobs.tick(START + 6) == [Probe("c", "inbox.new")]


def test_a_client_whose_inbox_is_gone_for_the_grace_is_forgotten() -> None:
    jobs = Jobs(LIMITS)
    add(jobs, "running")
    add(jobs, "done")
    jobs.finish("done", "result", 400, START)
    assert lapse(jobs, start=START, end=START + 12, gone=True) == []
    assert lapse(jobs, start=START + 13, end=START + 13, gone=True) == [Forget("done"), Forget("running")]
    assert is_empty(jobs)


@pytest.mark.parametrize("sign", ["heard", "probe", "new job"])
def test_a_sign_of_life_within_the_grace_saves_the_jobs(sign: str) -> None:
    jobs = Jobs(LIMITS)
    add(jobs, "1")
    lapse(jobs, start=START, end=START + 12, gone=True)
    if sign == "heard":
        jobs.heard("c", "inbox.c", START + 12.5)
    elif sign == "probe":
        jobs.probe_answered("c", gone=False, now=START + 12.5)
    else:
        add(jobs, "2", now=START + 12.5)
    assert lapse(jobs, start=START + 13, end=START + 22, gone=True) == []
    assert jobs.get("1") is not None


def test_a_client_that_is_there_but_silent_keeps_its_jobs_up_to_the_orphan_timeout() -> None:
    jobs = Jobs(LIMITS)
    add(jobs, "running")
    add(jobs, "done")
    jobs.finish("done", "result", 400, START)
    assert lapse(jobs, start=START, end=START + 299, gone=False) == []
    (expire,) = lapse(jobs, start=START + 300, end=START + 300, gone=False)
    assert isinstance(expire, Expire)
    assert expire.job == "running"
    assert "300 s" in expire.reason


def test_a_client_that_dies_after_its_jobs_expired_leaves_nothing() -> None:
    """CASES P33."""
    jobs = Jobs(LIMITS)
    add(jobs, "1")
    (expire,) = lapse(jobs, start=START, end=START + 300, gone=False)
    assert isinstance(expire, Expire)
    jobs.replace_outcome("1", "expired", START + 300)
    assert jobs.finish("1", "cancelled", 0, START + 301) == (None, [])
    assert lapse(jobs, start=START + 301, end=START + 320, gone=True) == [Forget("1")]
    assert is_empty(jobs)


def test_a_plain_requester_is_never_probed_as_the_probe_would_be_its_one_reply() -> None:
    jobs = Jobs(LIMITS)
    add(jobs, "1", plain=True)
    assert jobs.tick(START + 1000) == []
    assert jobs.finish("1", "outcome", 0, START + 1001)[0] is not None
    assert is_empty(jobs)


def test_while_this_side_is_cut_off_no_clock_runs() -> None:
    """DESIGN 6: a restart of NATS loses no job."""
    jobs = Jobs(LIMITS)
    add(jobs, "running")
    add(jobs, "done")
    jobs.finish("done", "result", 400, START)
    lapse(jobs, start=START, end=START + 5, gone=True)
    outage_s = 5000.0
    jobs.shift_clocks(outage_s)
    assert lapse(jobs, start=START + outage_s + 5, end=START + outage_s + 12, gone=True) == []
    assert lapse(jobs, start=START + outage_s + 13, end=START + outage_s + 13, gone=True) == [
        Forget("done"),
        Forget("running"),
    ]


def test_an_answer_about_a_forgotten_client_is_harmless() -> None:
    jobs = Jobs(LIMITS)
    jobs.probe_answered("nobody", gone=True, now=START)
    jobs.heard("nobody", "inbox", START)
    assert is_empty(jobs)


class JobsMachine(RuleBasedStateMachine):
    """Random lives of jobs; the accounts must be exact at every step."""

    CLIENTS = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.jobs = Jobs(LIMITS)
        self.now = START
        self.count = 0
        self.here: dict[str, Job] = {}

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Forget(job=name):
                    assert self.here.pop(name).outcome is None
                case Expire(job=name):
                    assert self.here[name].state is not JobState.DONE
                    self.jobs.replace_outcome(name, "expired", self.now)
                case Lose(job=name):
                    assert not self.here[name].lost
                    self.jobs.replace_outcome(name, "lost", self.now)
                case Probe(client=client, inbox=inbox):
                    assert inbox.endswith(client)

    @rule(client=CLIENTS)
    def admit(self, client: str) -> None:
        self.count += 1
        name = str(self.count)
        self.here[name] = add(self.jobs, name, client=client, now=self.now)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), size=st.integers(0, 700))
    def finish(self, data: st.DataObject, size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        was_done = self.here[name].state is JobState.DONE
        job, instructions = self.jobs.finish(name, "result", size, self.now)
        assert (job is None) == was_done
        self.obey(instructions)
        assert self.jobs.held_bytes <= LIMITS.hold_results_bytes

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        self.obey(self.jobs.release([name, name, "unknown"], self.here[name].client))
        assert name not in self.here

    @rule(client=CLIENTS, gone=st.booleans())
    def probe(self, client: str, gone: bool) -> None:
        self.jobs.probe_answered(client, gone=gone, now=self.now)

    @rule(client=CLIENTS)
    def hear(self, client: str) -> None:
        self.jobs.heard(client, f"other.{client}", self.now)

    @rule(outage_s=st.sampled_from([1.0, 1000.0]))
    def outage(self, outage_s: float) -> None:
        self.now += outage_s
        self.jobs.shift_clocks(outage_s)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 301.0, 601.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.jobs.tick(self.now))
        for name in list(self.here):
            if self.jobs.get(name) is None:
                assert self.here.pop(name).lost, "only the tombstone of a lost result leaves without a word"

    @invariant()
    def accounts_are_exact(self) -> None:
        held = [job for job in self.here.values() if job.state is JobState.DONE]
        assert self.jobs.held_bytes == sum(job.held_bytes for job in held)
        assert self.jobs.held_count == len(held)
        assert len(self.jobs) == len(self.here)
        assert {id(job) for job in self.jobs.unfinished()} == {id(job) for job in self.here.values()} - set(
            map(id, held)
        )

    @invariant()
    def leases_are_of_clients_with_jobs(self) -> None:
        leased = {client: lease.jobs for client, lease in self.jobs._leases.items()}
        owned: dict[str, set[str]] = {}
        for name, job in self.here.items():
            owned.setdefault(job.client, set()).add(name)
        assert leased == owned

    def teardown(self) -> None:
        for name, job in list(self.here.items()):
            self.obey(self.jobs.release([name], job.client))
        assert is_empty(self.jobs)


TestJobsMachine = JobsMachine.TestCase
TestJobsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_job_that_its_living_client_never_asks_about_is_expired() -> None:
    """Its acceptance was lost: the client runs it elsewhere and knows nothing of this copy."""
    jobs = Jobs(LIMITS)
    add(jobs, "known")
    add(jobs, "ghost")
    said: list[Instruction] = []
    for second in range(1, 32):
        now = START + second
        jobs.heard("c", "inbox.c", now)
        jobs.checked("c")
        assert jobs.mentioned("known", "c", now) is not None
        said += jobs.tick(now)
        if said:
            jobs.replace_outcome("ghost", "expired", now)
    (expire,) = said
    assert isinstance(expire, Expire)
    assert expire.job == "ghost"


def test_only_its_own_client_keeps_a_job_alive() -> None:
    jobs = Jobs(LIMITS)
    job = add(jobs, "1")
    assert jobs.mentioned("1", "another", START + 5) is None
    assert job.heard_at == START
    assert jobs.mentioned("1", "c", START + 5) is job
    assert job.heard_at == START + 5


def test_after_a_long_silence_one_word_on_one_job_does_not_expire_the_others() -> None:
    """A client that was cut off for a minute comes back: a repeated run or a part may arrive before its check."""
    jobs = Jobs(LIMITS)
    for name in ("1", "2"):
        add(jobs, name)
    for second in range(1, 6):
        jobs.checked("c")
        for name in ("1", "2"):
            jobs.mentioned(name, "c", START + second)
    back = START + 65
    jobs.heard("c", "inbox.c", back)
    jobs.mentioned("1", "c", back)
    assert jobs.tick(back + 0.25) == []


def test_a_new_job_of_a_client_that_has_checked_for_long_is_not_passed_over() -> None:
    jobs = Jobs(LIMITS)
    add(jobs, "old")
    for second in range(1, 100):
        jobs.checked("c")
        jobs.mentioned("old", "c", START + second)
    add(jobs, "new", now=START + 100)
    assert jobs.tick(START + 100.25) == []
