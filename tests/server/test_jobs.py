"""The job table: held results, and clients that fall silent (CASES P07, P33)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.server.jobs import Expire, Forget, Instruction, Job, Jobs, JobState, LeaseLimits, LetGo, Lose, Probe

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
        finish(jobs, str(number), size, now=START + number)
    return jobs


def finish(jobs: Jobs, name: str, size: int = 0, *, outcome: str = "result", now: float = START) -> Job | None:
    return jobs.finish(name, outcome, size_bytes=size, is_failure=outcome == "failure", now=now)


def replace(jobs: Jobs, name: str, failure: str, now: float) -> None:
    jobs.replace_outcome(name, failure, size_bytes=0, now=now)


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
    assert finish(jobs, "1", 400, now=START + 1) is job
    assert (job.state, job.outcome, jobs.held_bytes, jobs.held_count) == (JobState.DONE, "result", 400, 1)
    assert jobs.unfinished() == []
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
    assert finish(jobs, "0", 10, outcome="again") is None
    assert finish(jobs, "unknown", 10) is None
    assert jobs.held_bytes == 10


def test_a_plain_request_holds_nothing() -> None:
    jobs = Jobs(LIMITS)
    job = add(jobs, "1", plain=True)
    assert finish(jobs, "1", 400) is job
    assert is_empty(jobs)


def test_age_of_the_oldest_unfinished_job() -> None:
    jobs = holding(10)
    assert jobs.oldest_age_s(START + 50) == 0.0
    add(jobs, "new", now=START + 20)
    assert jobs.oldest_age_s(START + 50) == 30.0


# ---- what is held, and for how long


def test_over_the_budget_nothing_is_lost() -> None:
    """CASES P33: a bound with back-pressure instead of growth, and instead of loss."""
    jobs = holding(400, 400, 5000)
    jobs.heard("c", "inbox.c", START + 9)
    assert jobs.tick(START + 9) == []
    assert (jobs.is_full, jobs.held_count, jobs.held_bytes) == (True, 3, 5800)
    assert jobs.heavy_clients == {"c"}
    jobs.release(["2"], "c")
    assert not jobs.is_full
    assert jobs.heavy_clients == {"c"}
    jobs.release(["1"], "c")
    assert jobs.heavy_clients == set()


def test_a_result_that_is_not_collected_is_lost_then_forgotten() -> None:
    jobs = holding(400)
    jobs.heard("c", "", START + 599)
    assert jobs.tick(START + 599) == []
    jobs.heard("c", "", START + 600)
    (lose,) = jobs.tick(START + 600)
    assert isinstance(lose, Lose)
    replace(jobs, "0", "lost", START + 600)
    assert jobs.held_bytes == 0
    jobs.heard("c", "", START + 1199)
    jobs.tick(START + 1199)
    assert jobs.held_count == 1
    jobs.heard("c", "", START + 1200)
    assert jobs.tick(START + 1200) == []
    assert is_empty(jobs)


def test_a_failure_that_is_not_collected_stays_what_it_is_until_it_leaves() -> None:
    """A client that asks late is told why its job failed, not that a result was lost."""
    jobs = Jobs(LIMITS)
    job = add(jobs, "1")
    finish(jobs, "1", 40, outcome="failure")
    jobs.heard("c", "", START + 599)
    assert jobs.tick(START + 599) == []
    assert job.outcome == "failure"
    jobs.heard("c", "", START + 600)
    assert jobs.tick(START + 600) == []
    assert is_empty(jobs)


def test_while_memory_is_short_what_was_sent_and_is_asked_for_no_more_is_let_go() -> None:
    """A client that never says done keeps no server from its work for long."""
    jobs = holding(400, 400, 400)
    for name in ("0", "1"):
        jobs.sent(name, START + 3)
    jobs.mentioned("1", "c", START + 8)
    jobs.heard("c", "inbox.c", START + 13)
    assert jobs.tick(START + 12.9) == []
    assert jobs.tick(START + 13) == [LetGo("0")]
    assert jobs.get("0") is None
    assert (jobs.is_full, jobs.held_count) == (False, 2)
    jobs.heard("c", "inbox.c", START + 18)
    assert jobs.tick(START + 18) == [LetGo("1")], "its client still uses half of the memory"
    jobs.heard("c", "inbox.c", START + 500)
    assert jobs.tick(START + 500) == [], "the last one was never sent"


def test_an_input_that_stops_coming_gives_its_slot_back() -> None:
    """Its client asks about it every second and sends nothing."""
    jobs = Jobs(LIMITS)
    job = add(jobs, "1")
    job.state = JobState.RECEIVING
    job.fed_at = START + 50
    for second in range(1, 350):
        now = START + second
        jobs.heard("c", "inbox.c", now)
        jobs.checked("c")
        jobs.mentioned("1", "c", now)
        assert jobs.tick(now) == []
    jobs.heard("c", "inbox.c", START + 350)
    (expire,) = jobs.tick(START + 350)
    assert isinstance(expire, Expire)
    assert "no part of its input came for 300 s" in expire.reason


def test_replacing_the_outcome_of_an_unknown_job_is_harmless() -> None:
    jobs = Jobs(LIMITS)
    replace(jobs, "nobody", "lost", START)
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
    finish(jobs, "done", 400)
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
    finish(jobs, "done", 400)
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
    replace(jobs, "1", "expired", START + 300)
    assert finish(jobs, "1", now=START + 301) is None
    assert lapse(jobs, start=START + 301, end=START + 320, gone=True) == [Forget("1")]
    assert is_empty(jobs)


def test_a_plain_requester_is_never_probed_as_the_probe_would_be_its_one_reply() -> None:
    jobs = Jobs(LIMITS)
    add(jobs, "1", plain=True)
    assert jobs.tick(START + 1000) == []
    assert finish(jobs, "1", now=START + 1001) is not None
    assert is_empty(jobs)


def test_while_this_side_is_cut_off_no_clock_runs() -> None:
    """DESIGN 6: a restart of NATS loses no job."""
    jobs = Jobs(LIMITS)
    add(jobs, "running")
    add(jobs, "done")
    finish(jobs, "done", 400)
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
        self.sizes: dict[str, int] = {}
        self.sent: set[str] = set()
        self.failures: set[str] = set()

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Forget(job=name):
                    assert self.here.pop(name).outcome is None
                case Expire(job=name):
                    assert self.here[name].state is not JobState.DONE
                    self.fail(name)
                case Lose(job=name):
                    assert name not in self.failures
                    self.fail(name)
                case LetGo(job=name):
                    assert self.here.pop(name).outcome is None
                    assert name in self.sent, "nothing that its client may need is dropped for memory"
                case Probe(client=client, inbox=inbox):
                    assert inbox.endswith(client)

    def fail(self, name: str) -> None:
        self.failures.add(name)
        self.sent.discard(name)
        self.sizes[name] = 7
        self.jobs.replace_outcome(name, "failure", size_bytes=7, now=self.now)

    @rule(client=CLIENTS)
    def admit(self, client: str) -> None:
        self.count += 1
        name = str(self.count)
        self.here[name] = add(self.jobs, name, client=client, now=self.now)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), size=st.integers(0, 700), outcome=st.sampled_from(["result", "failure"]))
    def finish(self, data: st.DataObject, size: int, outcome: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        was_done = self.here[name].state is JobState.DONE
        assert (finish(self.jobs, name, size, outcome=outcome, now=self.now) is None) == was_done
        if not was_done:
            self.sizes[name] = size
            if outcome == "failure":
                self.failures.add(name)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), is_asked=st.booleans())
    def send(self, data: st.DataObject, is_asked: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        if is_asked:
            self.jobs.mentioned(name, self.here[name].client, self.now)
        elif self.here[name].state is JobState.DONE:
            self.sent.add(name)
            self.jobs.sent(name, self.now)

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
                assert self.here.pop(name).outcome is None
                assert name in self.failures, "only a failure leaves without a word"

    @invariant()
    def accounts_are_exact(self) -> None:
        held = [job for job in self.here.values() if job.state is JobState.DONE]
        sizes = {job.job: self.sizes[job.job] for job in held}
        assert self.jobs.held_bytes == sum(sizes.values())
        assert self.jobs.is_full == (sum(sizes.values()) >= LIMITS.hold_results_bytes)
        shares = Counter[str]()
        for job in held:
            shares[job.client] += sizes[job.job]
        assert self.jobs.heavy_clients == {c for c, size in shares.items() if 2 * size >= LIMITS.hold_results_bytes}
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
            replace(jobs, "ghost", "expired", now)
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
