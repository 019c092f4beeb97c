"""setup_logging: each line once, in the asked form, on the envbus loggers only."""

import io
import json
import logging
import re
import sys

import pytest

from envbus.errors import UsageError
from envbus.logs import setup_logging, tail

logger = logging.getLogger("envbus.some.part")


@pytest.fixture(autouse=True)
def _restored_loggers():
    tree, root = logging.getLogger("envbus"), logging.getLogger()
    level, handlers = tree.level, list(root.handlers)
    yield
    setup_logging(console=False)
    tree.setLevel(level)
    tree.propagate = True
    assert [handler for handler in root.handlers if handler not in handlers] == []


def test_a_line_is_written_once_to_file_and_console(tmp_path, capsys):
    """P64: also after a second call, and with a missing folder."""
    file = tmp_path / "deep" / "server.log"
    setup_logging(log_file=file)
    setup_logging("DEBUG", log_file=file)
    ids = {"job": "ab12ab12ab12", "server": "cd34cd34cd34"}
    logger.debug("loaded %d rows", 3, extra=ids | {"attempt": 2})
    logging.getLogger("other").warning("not ours")
    for text in (file.read_text(), capsys.readouterr().err):
        assert text.count("\n") == 1
        assert text.rstrip().endswith(
            "DEBUG   envbus.some.part: loaded 3 rows job=ab12ab12ab12 server=cd34cd34 attempt=2"
        )


def test_fields_are_on_the_first_line_and_a_sum_says_its_number_once(tmp_path):
    text, lines = tmp_path / "text", tmp_path / "json"
    for file, as_json in ((text, False), (lines, True)):
        setup_logging(log_file=file, json=as_json, console=False)
        logger.warning("bad (the last of 3)\n    more", extra={"count": 3, "pid": 7})
    first, second = text.read_text().splitlines()
    assert first.endswith("bad (the last of 3) pid=7")
    assert second == "    more"
    assert json.loads(lines.read_text())["count"] == 3


def test_the_level_holds(tmp_path):
    setup_logging("warning", log_file=tmp_path / "log", console=False)
    logger.info("too much")
    logger.warning("enough")
    assert len(tail(tmp_path / "log")) == 1


def test_json_lines_carry_extra_fields_and_the_traceback(tmp_path):
    file = tmp_path / "log"
    setup_logging(log_file=file, json=True, console=False)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("it\nbroke", extra={"server": "s1", "reward": float("nan"), "where": tmp_path})
    logger.info("fine")
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("ERROR", "envbus.some.part", "it\nbroke")
    assert (first["server"], first["reward"], first["where"]) == ("s1", "nan", str(tmp_path))
    assert "ValueError: two\nlines" in first["exception"]
    assert set(second) == {"time", "level", "logger", "message"}


def test_json_applies_to_the_console(capsys):
    setup_logging(json=True)
    logger.info("hello")
    assert json.loads(capsys.readouterr().err)["message"] == "hello"


def test_a_terminal_gets_the_rich_form(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    setup_logging()
    logger.warning("[bold]as written[/bold]", extra={"env": "e"})
    written = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert "WARNING  [bold]as written[/bold] env=e" in written


def test_a_restart_appends(tmp_path):
    """P64: the lines of the crashed run stay."""
    for _ in range(2):
        setup_logging(log_file=tmp_path / "log", console=False)
        logger.info("started")
    assert len(tail(tmp_path / "log")) == 2


def test_what_cannot_be_done_is_a_usage_error_and_changes_nothing(tmp_path):
    setup_logging(log_file=tmp_path / "log", console=False)
    with pytest.raises(UsageError, match="cannot write the log file"):
        setup_logging(log_file=tmp_path / "log" / "below a file")
    with pytest.raises(UsageError, match="unknown log level 'LOUD'"):
        setup_logging("LOUD")
    logger.info("still here")
    assert len(tail(tmp_path / "log")) == 1


def test_tail_gives_the_last_lines(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"".join(b"line %d\n" % n for n in range(100_000)) + b"caf\xff")
    assert tail(file, lines=2) == ["line 99999", "caf\ufffd"]
    assert len(tail(file)) == 20
    assert tail(file, lines=0) == tail(tmp_path / "absent") == []
