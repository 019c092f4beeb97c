"""What a controller writes down about its servers, so that the next one of the same name finds them.

One file, replaced as a whole at each change. Only a process with the noted start time is taken over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from envbus.controller.processes import Record
from envbus.errors import UsageError

FILE_NAME = "servers.json"


class ServerRegister:
    """The file.

    Args:
        folder: The controller's log folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME

    def read(self) -> list[Record]:
        """Return what the last controller had, oldest generation first; empty without a file.

        Raises:
            UsageError: The file is not ours to read.
        """
        try:
            entries = json.loads(self._file.read_text(encoding="utf-8"))
            records = [Record(**entry) for entry in entries["servers"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"cannot read {self._file}, which says which servers to take over ({error}); "
                "stop those that still run and remove the file"
            ) from error
        return sorted(records, key=lambda record: record.generation)

    def write(self, records: Sequence[Record]) -> None:
        """Note these servers instead of the ones before."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({"servers": [asdict(record) for record in records]}, indent=1), encoding="utf-8")
        draft.replace(self._file)
