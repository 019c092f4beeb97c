"""Rows and metadata of a run on disk.

A row is one line of strict JSON: the output plus ``index``, its position among the
inputs. Rows are only ever appended; of several rows of an index the newest holds.
A line that is cut off or damaged counts as not written.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, cast

from envbus.error_chain import error_info
from envbus.errors import EncodeError, UsageError
from envbus.evaluation import strict_json
from envbus.evaluation.rows import malformed_field
from envbus.evaluation.run_paths import METADATA_FILE, RESULTS_FILE, run_folder
from envbus.types import GenerateMetadata, GenerateOutputs, RolloutOutput

logger = logging.getLogger(__name__)


def load_results(path: Path | str) -> GenerateOutputs:
    """Read a saved run.

    Args:
        path: The run's folder, or its results file.

    Returns:
        Outputs in input order (those that were saved) and the metadata.

    Raises:
        UsageError: There is no such run, or its metadata cannot be read.
    """
    rows = read_rows(path)
    return {"outputs": [rows[index] for index in sorted(rows)], "metadata": read_metadata(path)}


def read_metadata(path: Path | str) -> GenerateMetadata:
    """Read a run's metadata.

    Raises:
        UsageError: It is missing or damaged.
    """
    file = run_folder(path) / METADATA_FILE
    try:
        metadata = strict_json.loads(file.read_bytes())
    except (OSError, ValueError, TypeError, RecursionError) as exc:
        raise UsageError(f"cannot read {file}: {exc}; start a new run with another results path") from exc
    if not isinstance(metadata, dict):
        raise UsageError(f"{file} does not hold a run's metadata; start a new run with another results path")
    return cast(GenerateMetadata, metadata)


def read_rows(path: Path | str) -> dict[int, RolloutOutput]:
    """Read the newest row of each index; damaged lines are skipped with a warning.

    Raises:
        UsageError: The results file cannot be read.
    """
    file = run_folder(path) / RESULTS_FILE
    rows: dict[int, RolloutOutput] = {}
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if (row := _parse_row(line)) is None:
                    logger.warning("%s: line %d is cut off or damaged; it counts as not run", file, number)
                else:
                    rows[cast(int, row.pop("index"))] = cast(RolloutOutput, row)
    except OSError as exc:
        raise UsageError(f"cannot read {file}: {exc}") from exc
    return rows


def write_metadata(folder: Path, metadata: GenerateMetadata) -> None:
    """Replace the run's metadata in one step.

    Raises:
        OSError: It could not be written; what was there is unchanged.
    """
    draft = folder / f".{METADATA_FILE}.{os.getpid()}"
    try:
        with draft.open("w", encoding="ascii") as file:
            file.write(strict_json.dumps(metadata, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / METADATA_FILE)
    finally:
        draft.unlink(missing_ok=True)


class ResultsWriter:
    """Appends rows from one thread of its own, so a slow disk does not stop the event loop.

    A failed write is logged once and does not raise; its rows are tried again at close.

    Args:
        folder: The run's folder; created when missing. A cut last line in it is removed.

    Raises:
        UsageError: The folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unsaved: dict[int, RolloutOutput] = {}
        self._torn = False
        self._unencodable: dict[int, str] = {}
        self._first_error: OSError | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(folder / RESULTS_FILE, "a+")
            self._end_bytes = _cut_unfinished_line(self._file)
        except OSError as exc:
            raise UsageError(f"cannot save results in {folder}: {exc}; choose another results path") from exc
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="envbus-results")

    async def append(self, rows: Mapping[int, RolloutOutput]) -> None:
        """Write rows, by index; they are written even when the caller is cancelled meanwhile."""
        await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._append, rows)))

    def close(self) -> str | None:
        """Finish writing and close the file.

        Returns:
            What could not be saved and why; None when all is saved.
        """
        self._thread.shutdown(wait=True)
        retried, self._unsaved = self._unsaved, {}
        self._append(retried)
        self._file.close()
        lost = {**self._unencodable, **dict.fromkeys(self._unsaved, str(self._first_error))}
        return f"{len(lost)} rows could not be saved: {'; '.join(sorted(set(lost.values())))}" if lost else None

    def _append(self, rows: Mapping[int, RolloutOutput]) -> None:
        for index, output in rows.items():
            try:
                self._write(self._encode(index, output))
            except OSError as exc:
                self._unsaved[index] = output
                self._note_error(exc)

    def _encode(self, index: int, output: RolloutOutput) -> bytes:
        try:
            return _row_line(index, output)
        except Exception as exc:  # noqa: BLE001 - objects of an environment may raise anything; the row says so
            error = EncodeError("the output cannot be saved", path=f"row {index}")
            error.__cause__ = exc
            self._unencodable[index] = f"{type(exc).__name__}: {exc}"
            logger.error("%s: %s", error, self._unencodable[index])
            row: RolloutOutput = {"reward": None, "metrics": {}, "error": error_info(error)}
            return _row_line(index, row)

    def _write(self, line: bytes) -> None:
        if self._torn:  # half a line is there, the next would be glued to it
            self._file.truncate(self._end_bytes)
        self._torn = True
        view = memoryview(line)
        while view:
            view = view[self._file.write(view) :]
        self._torn = False
        self._end_bytes += len(line)

    def _note_error(self, exc: OSError) -> None:
        if self._first_error is None:
            self._first_error = exc
            logger.error("cannot write results to %s: %s; the evaluation goes on", self.folder, exc)


def _row_line(index: int, output: RolloutOutput) -> bytes:
    return strict_json.dumps({**output, "index": index}).encode("ascii") + b"\n"


def _parse_row(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = strict_json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("index")) is int and row["index"] >= 0
    return row if is_row and malformed_field(row) is None else None


def _cut_unfinished_line(file: FileIO) -> int:
    """Remove what follows the last line break; the size that is left."""
    size = position = file.seek(0, os.SEEK_END)
    end = 0
    while position and not end:
        start = max(0, position - 65536)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        end = start + newline + 1 if newline >= 0 else 0
        position = start
    if end < size:
        logger.warning("%s: removed a last line that was cut off", file.name)
        file.truncate(end)
    return end
