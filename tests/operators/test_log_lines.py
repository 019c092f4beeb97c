"""Reading a growing log, last lines first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envbus.server.log_lines import read_log


def test_last_lines_then_what_comes_after(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\nthree\nfo")
    assert read_log(log, lines=2) == (["two", "three"], 14)
    assert read_log(log, lines=9, after=14) == ([], 14), "a line that is not complete waits"
    with log.open("ab") as file:
        file.write(b"ur\nfive\r\nsix\n")
    assert read_log(log, lines=2, after=14) == (["four", "five"], 25)
    assert read_log(log, lines=2, after=25) == (["six"], 29)
    log.write_bytes(b"anew\n")
    assert read_log(log, lines=9, after=29) == (["anew"], 5), "the file was replaced"


def test_nothing_yet_no_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(FileNotFoundError):
        read_log(log, lines=1)
    log.touch()
    assert read_log(log, lines=5) == ([], 0)
    log.write_bytes(b"\xff\n")
    assert read_log(log, lines=5) == (["\ufffd"], 2)


def test_a_line_longer_than_the_buffer_comes_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 25 + b"\nend\n")
    pieces, after = [], 0
    while True:
        lines, following = read_log(log, lines=10, after=after, max_bytes=10)
        if following == after:
            break
        pieces += lines
        after = following
    assert pieces == ["x" * 10, "x" * 10, "x" * 5, "end"]
    assert read_log(log, lines=10, max_bytes=10)[0] == ["end"], "a first line that was cut is left out"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(texts=st.lists(st.text("ab ", max_size=6), max_size=20), count=st.integers(1, 7), max_bytes=st.integers(10, 40))
def test_following_loses_and_repeats_nothing(tmp_path: Path, texts: list[str], count: int, max_bytes: int) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"{text}\n" for text in texts))
    seen: list[str] = []
    after = 0
    for _ in range(1000):
        lines, following = read_log(log, lines=count, after=after, max_bytes=max_bytes)
        seen += lines
        if following == after:
            break
        after = following
    assert seen == texts
    assert read_log(log, lines=3, max_bytes=4096)[0] == texts[-3:]
