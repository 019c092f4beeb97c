"""What a saved run lets us skip, and whether it is the same run at all."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from envbus.errors import UsageError
from envbus.evaluation import strict_json
from envbus.evaluation.results import read_metadata, read_rows
from envbus.evaluation.run_paths import RESULTS_FILE
from envbus.types import GenerateMetadata, RolloutInput, RolloutOutput

logger = logging.getLogger(__name__)

_SAME_RUN_FIELDS = (
    "env_id",
    "env_args",
    "model",
    "rollouts_per_example",
    "num_examples",
    "sampling_args",
    "inputs_sha256",
)


def inputs_digest(examples: Sequence[RolloutInput]) -> str:
    """SHA-256 over the examples' ids, prompts and answers, in order."""
    digest = hashlib.sha256()
    for example in examples:
        identity = [example.get("example_id"), example.get("prompt"), example.get("answer")]
        digest.update(strict_json.dumps(identity).encode("ascii"))
    return digest.hexdigest()


def load_kept_rows(folder: Path, metadata: GenerateMetadata) -> dict[int, RolloutOutput]:
    """The saved outputs that need not run again, by index.

    With group scoring an example's rollouts are kept together or not at all, since they are scored together.

    Args:
        folder: The run's folder; nothing is kept when it has no results file.
        metadata: What the new call is going to run.

    Raises:
        UsageError: The saved run was started with other settings or on other examples.
    """
    if not (folder / RESULTS_FILE).is_file():
        return {}
    _check_same_run(read_metadata(folder), metadata, folder)
    total = metadata["num_examples"] * metadata["rollouts_per_example"]
    rows = {i: row for i, row in read_rows(folder).items() if i < total and not row.get("error")}
    if metadata["group_scoring"]:
        return _whole_groups(rows, metadata["rollouts_per_example"])
    return rows


def _whole_groups(rows: dict[int, RolloutOutput], size: int) -> dict[int, RolloutOutput]:
    return {i: row for i, row in rows.items() if all(i - i % size + member in rows for member in range(size))}


def _check_same_run(saved: GenerateMetadata, now: GenerateMetadata, folder: Path) -> None:
    for name in _SAME_RUN_FIELDS:
        before, after = saved.get(name), strict_json.loads(strict_json.dumps(now.get(name)))
        if before == after:
            continue
        if name == "inputs_sha256":
            raise UsageError(f"the run in {folder} was on other examples; start a new run with another results path")
        raise UsageError(
            f"the run in {folder} has {name}={before!r}, not {after!r}; "
            "resume it with the same settings or start a new run with another results path"
        )
