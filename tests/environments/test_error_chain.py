from __future__ import annotations

import json

import pytest

from envbus.error_chain import ErrorChain, error_info, error_matches
from envbus.errors import InfraError, ModelError, OverlongPromptError, RolloutError, ScoringError


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001
        return caught


class SandboxError(InfraError):
    pass


class DiskFullError(SandboxError):
    pass


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_str_and_repr_follow_the_causes() -> None:
    chain = ErrorChain(raised(RuntimeError("x"), raised(ValueError("y"), KeyError("z"))))

    assert str(chain) == "RuntimeError -> ValueError -> KeyError"
    assert repr(chain) == "RuntimeError('x') -> ValueError('y') -> KeyError('z')"


def test_contains_by_class_and_equality_by_type_names() -> None:
    chain = ErrorChain(raised(ScoringError("s"), raised(DiskFullError("d"))))

    assert InfraError in chain
    assert ModelError not in chain
    assert chain == ErrorChain(raised(ScoringError("other"), raised(DiskFullError("text"))))
    assert hash(chain) == hash(ErrorChain(raised(ScoringError("other"), raised(DiskFullError("text")))))
    assert chain != ErrorChain(ScoringError("s"))
    assert chain != "ScoringError -> DiskFullError"


def test_cycles_and_long_chains_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert str(ErrorChain(first)) == "ValueError -> ValueError"

    error: BaseException = ValueError("0")
    for i in range(1000):
        error = raised(ValueError(str(i)), error)
    assert len(ErrorChain(error).chain) == 16


def test_info_keeps_bases_and_retryable_of_the_live_class() -> None:
    """P30 (a), (b), (c)."""
    info = error_info(raised(DiskFullError("full"), OSError("no space")))

    assert info["error"] == "DiskFullError"
    assert info["error_chain_str"] == "DiskFullError -> OSError"
    assert info["error_bases"][:3] == ["DiskFullError", "SandboxError", "InfraError"]
    assert info["retryable"]
    assert error_matches(info, InfraError)
    assert error_matches(info, ModelError, RolloutError)
    assert not error_matches(info, ModelError, OSError)
    assert not error_info(OverlongPromptError("long"))["retryable"]
    assert "test_error_chain.py" in info["traceback"]


def test_a_wrapped_hiccup_stays_retryable() -> None:
    assert error_info(raised(ScoringError("s"), raised(SandboxError("d"))))["retryable"]


def test_matches_without_bases() -> None:
    assert error_matches(
        {"error": "InfraError", "error_chain_repr": "InfraError()", "error_chain_str": "InfraError"}, InfraError
    )


@pytest.mark.parametrize(
    "error",
    [
        UnprintableError(),
        ValueError("x" * 2_000_000),
        ValueError("lone \ud800 surrogate"),
        RecursionError(),
        KeyError(),
    ],
    ids=["unprintable", "2 MB", "surrogate", "recursion", "empty"],
)
def test_info_is_well_formed_and_bounded(error: BaseException) -> None:
    """P30 (d), (e)."""
    info = error_info(raised(RolloutError("outer"), raised(error)))

    assert len(json.dumps(info, ensure_ascii=False).encode()) < 20_000
    assert len(info["error_chain_repr"]) < 2 * 2_048 + 10
    assert len(info["traceback"]) <= 4_096
    assert info["error_chain_str"] == f"RolloutError -> {type(error).__name__}"
    assert "test_error_chain.py" in info["traceback"]
