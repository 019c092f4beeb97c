"""Errors over the bus keep their type, causes and advice (CASES P30)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from envbus import errors
from envbus.bus.failures import MAX_TEXT, from_failure, to_failure
from envbus.bus.messages import Failure, pack, parse_as
from envbus.errors import (
    BadRequestError,
    CallError,
    EncodeError,
    InfraError,
    OverlongPromptError,
    PayloadTooLargeError,
    RemoteError,
    ServerStoppingError,
)

CALL_ERRORS = CallError.__subclasses__()


class SandboxHiccupError(InfraError):
    """As an environment's package would define it."""

    code = 503  # type: ignore[assignment]


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def across(error: BaseException) -> CallError:
    failure = to_failure(error, origin="server1", job="j", attempt=2, server="server1")
    return from_failure(parse_as(pack(failure), Failure))


def chained(*raised: BaseException) -> BaseException:
    for outer, inner in pairwise(raised):
        outer.__cause__ = inner
    return raised[0]


@pytest.mark.parametrize("cls", CALL_ERRORS)
def test_the_type_of_a_call_error_is_kept(cls: type[CallError]) -> None:
    got = across(cls("what happened", origin="elsewhere"))
    assert type(got) is cls
    assert got.retryable is cls.retryable
    assert got.origin == "server1"
    assert got.causes == ((cls.__name__, "what happened"),)


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.EnvbusError)]
    assert len(codes) == len(set(codes))


def test_the_message_of_a_known_error_is_unchanged() -> None:
    assert str(across(BadRequestError("'model' must be a str"))) == "'model' must be a str"


@pytest.mark.parametrize("retryable", [True, False])
def test_advice_is_decided_where_the_live_error_is(retryable: bool) -> None:
    assert across(ServerStoppingError("x", retryable=retryable)).retryable is retryable


def test_a_foreign_error_is_a_remote_error_that_names_it() -> None:
    got = across(KeyError("x"))
    assert type(got) is RemoteError
    assert str(got) == "KeyError: 'x'"
    assert not got.retryable


def test_errors_of_ours_that_are_no_call_errors_are_remote_errors_with_their_name() -> None:
    got = across(OverlongPromptError("9 of 8 tokens"))
    assert (type(got), str(got)) == (RemoteError, "OverlongPromptError: 9 of 8 tokens")
    assert type(across(EncodeError("no", path="a.b"))) is RemoteError
    assert "max_payload" in str(across(PayloadTooLargeError(size_bytes=2, limit_bytes=1)))


def test_a_subclass_from_an_environments_package_crosses_whatever_its_code() -> None:
    """CASES P30 (a), (c)."""
    got = across(chained(SandboxHiccupError("gone"), ConnectionResetError("peer"), OSError("reset")))
    assert type(got) is RemoteError
    assert got.retryable
    assert got.causes == (
        ("SandboxHiccupError", "gone"),
        ("ConnectionResetError", "peer"),
        ("OSError", "reset"),
    )


def test_a_long_or_circular_chain_is_bounded() -> None:
    first, second = ValueError("1"), ValueError("2")
    assert len(across(chained(first, second, first)).causes) == 10
    assert len(across(chained(*(ValueError(str(number)) for number in range(50)))).causes) == 10


def test_an_error_whose_text_cannot_be_had_still_crosses() -> None:
    """CASES P30 (d)."""
    assert across(SilentError()).causes == (("SilentError", "unprintable error"),)


def test_a_text_of_2_mb_is_bounded() -> None:
    """CASES P30 (e)."""
    failure = to_failure(chained(ValueError("x" * 2_000_000), ValueError("y" * 2_000_000)), origin="s")
    assert len(failure.message) == MAX_TEXT
    assert failure.message.endswith("…")
    assert len(pack(failure)) < 4 * MAX_TEXT


def test_a_text_that_is_no_unicode_crosses() -> None:
    assert str(across(BadRequestError("file \udcff"))) == "file \\udcff"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ExceptionGroup("several", [ValueError("x")])])
def test_unusual_errors_cross(error: BaseException) -> None:
    assert str(across(error)).startswith(type(error).__name__)


def test_a_code_that_this_side_does_not_know_is_a_remote_error() -> None:
    got = from_failure(Failure(code="new_in_version_9", message="m", retryable=True, server="s2"))
    assert (type(got), str(got), got.origin, got.retryable) == (RemoteError, "m", "s2", True)
    assert from_failure(Failure(code="bad_request", message="m")).origin == "server"


def test_a_failure_of_a_stranger_is_bounded_and_can_be_printed() -> None:
    wild = Failure(
        code="\ud800", message="m\ud800" * 10**5, origin="o" * 10**5, causes=[("\ud800", "c" * 10**5)] * 1000
    )
    error = from_failure(wild)
    assert type(error) is RemoteError
    assert len(str(error)) <= 2 * MAX_TEXT + 100
    assert len(error.causes) == 10
    f"{error} {error.origin} {error.causes}".encode()
