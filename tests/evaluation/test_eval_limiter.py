"""The weighted first-in, first-out limiter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.errors import UsageError
from envbus.evaluation.limiter import FifoLimiter


@given(
    limit=st.integers(1, 12), weights=st.lists(st.integers(1, 12), max_size=40), order=st.randoms(use_true_random=False)
)
def test_all_items_run_in_order_within_the_limit(limit, weights, order):
    """P31, P52: the limit counts weight, nothing overtakes and nothing is left over."""
    line = FifoLimiter(limit)
    weights = [min(weight, limit) for weight in weights]
    for item, weight in enumerate(weights):
        line.add(item, weight=weight)
    started, running = [], []
    while len(line) or running:
        ready = line.start_ready()
        started += ready
        running += ready
        assert sum(weights[item] for item in running) == line.running <= limit
        done = running.pop(order.randrange(len(running)))
        line.release(weight=weights[done])
    assert started == list(range(len(weights)))
    assert line.running == 0


def test_without_a_limit_all_start_at_once():
    line = FifoLimiter(-1)
    for item in range(100):
        line.add(item, weight=50)
    assert line.start_ready() == list(range(100))


def test_a_small_item_does_not_overtake_a_large_one():
    line = FifoLimiter(4)
    for item, weight in (("a", 3), ("b", 4), ("c", 1)):
        line.add(item, weight=weight)
    assert line.start_ready() == ["a"]
    line.release(weight=3)
    assert line.start_ready() == ["b"]


def test_an_item_over_the_limit_is_refused():
    """P31: it would wait for ever."""
    with pytest.raises(UsageError, match=r"group of 5 .* max_concurrent=4"):
        FifoLimiter(4).add("group", weight=5)


@pytest.mark.parametrize("limit", [0, -2])
def test_a_senseless_limit_is_refused(limit):
    with pytest.raises(UsageError, match="max_concurrent"):
        FifoLimiter(limit)
