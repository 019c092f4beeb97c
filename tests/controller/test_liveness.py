"""When silence, a standing loop and work that does not move make a server suspect and stuck (pure)."""

from __future__ import annotations

import pytest

from envbus.controller.liveness import Signs, Vitals
from envbus.controller.policies import LivenessPolicy

POLICY = LivenessPolicy(
    suspect_after_s=10, stuck_after_s=60, blocked_after_s=100, no_progress_s=200, load_timeout_s=500
)


def level(vitals: Vitals, now: float) -> str | None:
    doubt = vitals.doubt(POLICY, now)
    return doubt.level if doubt is not None else None


def beating(vitals: Vitals, until: int, signs: Signs, *, cpu_share: float | None = None, start: int = 1) -> list[str]:
    """Beat once a second; every level of doubt that came up."""
    levels = []
    for now in range(start, until + 1):
        cpu_s = None if cpu_share is None else now * cpu_share
        vitals.beat(Signs(signs.state, signs.in_flight, signs.waiting, signs.ended, signs.lag_s, cpu_s), now)
        levels.append(level(vitals, now) or "")
    return levels


@pytest.mark.parametrize(("silence_s", "expected"), [(9, None), (10, "suspect"), (59, "suspect"), (60, "stuck")])
def test_silence(silence_s: float, expected: str | None) -> None:
    vitals = Vitals.begin(0)
    vitals.beat(Signs("ready"), 5)
    assert level(vitals, 5 + silence_s) == expected


def test_before_the_first_beat_only_loading_has_a_limit() -> None:
    """P17: a slow start of the interpreter is no silence."""
    assert level(Vitals.begin(0), 499) is None
    assert level(Vitals.begin(0), 500) == "stuck"


def test_an_answer_or_a_beat_ends_the_doubt() -> None:
    vitals = Vitals.begin(0, has_beaten=True)
    assert level(vitals, 30) == "suspect"
    vitals.hear(30)
    assert level(vitals, 31) is None


def test_an_outage_of_nats_is_not_silence() -> None:
    """P24: the clocks stand still while nothing could be heard."""
    vitals = Vitals.begin(0)
    vitals.beat(Signs("full", in_flight=1, waiting=1), 1)
    for now in range(2, 1000):
        vitals.shift(1)
        assert level(vitals, now) is None


def test_a_busy_loop_is_not_death() -> None:
    """P08: the loop does not answer, but the process computes."""
    signs = Signs("full", in_flight=4, waiting=0, lag_s=30)
    assert set(beating(Vitals.begin(0), 1000, signs, cpu_share=0.9)) == {""}


def test_a_lagging_loop_of_unknown_cpu_is_not_death() -> None:
    assert set(beating(Vitals.begin(0), 1000, Signs("full", in_flight=4, lag_s=30))) == {""}


def test_a_loop_that_stands_still_without_computing_is_stuck() -> None:
    levels = beating(Vitals.begin(0), 120, Signs("full", in_flight=1, lag_s=30), cpu_share=0.001)
    assert levels.index("suspect") + 1 == 51
    assert levels.index("stuck") + 1 == 101


def test_a_standing_loop_is_no_death_while_loading_or_draining() -> None:
    """P17: a slow load that waits for a download; a teardown that waits for the network."""
    for state in ("loading", "draining", "stopping"):
        assert set(beating(Vitals.begin(0), 400, Signs(state, lag_s=30), cpu_share=0.0)) == {""}


def test_loading_has_a_limit() -> None:
    levels = beating(Vitals.begin(0), 600, Signs("loading"))
    assert levels.index("stuck") + 1 == 500


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        (Signs("full", in_flight=2, waiting=3), "stuck"),
        (Signs("full", in_flight=2, waiting=0), ""),
        (Signs("ready", in_flight=0, waiting=3), ""),
        (Signs("draining", in_flight=2, waiting=3), ""),
    ],
)
def test_work_that_does_not_move(signs: Signs, expected: str) -> None:
    assert beating(Vitals.begin(0), 300, signs)[-1] == expected


def test_one_job_that_ends_is_progress() -> None:
    vitals = Vitals.begin(0)
    beating(vitals, 150, Signs("full", in_flight=2, waiting=3, ended=7))
    levels = beating(vitals, 300, Signs("full", in_flight=2, waiting=3, ended=8), start=151)
    assert "stuck" not in levels
