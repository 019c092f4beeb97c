"""Where runs are saved: ``<root>/evals/<env>--<model>/<run id>/``.

Names are percent-encoded so that each pair of env and model has one folder of
its own, and run ids sort by their start.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

RESULTS_FILE = "results.jsonl"
METADATA_FILE = "metadata.json"
DEFAULT_ROOT = Path("outputs")

_MAX_PART_CHARS = 100
_DASH_AT_EDGE = re.compile(r"^-|-$|(?<=-)-|-(?=-)")


def default_results_path(env_id: str, model: str, root: Path = DEFAULT_ROOT) -> Path:
    """A new run's folder; nothing is created."""
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{secrets.token_hex(3)}"
    return _runs_folder(env_id, model, root) / run_id


def find_latest_run(env_id: str, model: str, root: Path = DEFAULT_ROOT) -> Path | None:
    """The folder of the newest saved run of this env and model, finished or not; None without one."""
    folder = _runs_folder(env_id, model, root)
    runs = [path for path in folder.glob("*") if (path / RESULTS_FILE).is_file()]
    return max(runs, key=lambda path: path.name, default=None)


def run_folder(path: Path | str) -> Path:
    """The run's folder, given it or its results file."""
    path = Path(path)
    return path.parent if path.name == RESULTS_FILE else path


def _runs_folder(env_id: str, model: str, root: Path) -> Path:
    return root / "evals" / f"{_safe_part(env_id)}--{_safe_part(model)}"


def _safe_part(name: str) -> str:
    """The name as part of a file name, free of ``--`` and of dashes at its ends; long ones end in a digest."""
    safe = _DASH_AT_EDGE.sub("%2D", quote(name, safe="").replace("~", "%7E"))
    if len(safe) <= _MAX_PART_CHARS:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{safe[: _MAX_PART_CHARS - 17].rstrip('-')}~{digest}"
