"""Lets servers of another user run this Python: in a mount namespace where what is closed to others is open."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import envbus

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a server as another user")
NOBODY = 65534

_SCRIPT = """
set -e
while [ "$1" != -- ]; do
  layer=$(mktemp -d)
  mount -t tmpfs tmpfs "$layer"
  mkdir "$layer/upper" "$layer/work"
  mount -t overlay overlay -o "lowerdir=$1,upperdir=$layer/upper,workdir=$layer/work" "$1"
  umount -l "$layer"
  rmdir "$layer"
  for folder in $2; do chmod o+rx "$folder"; done
  shift 2
done
shift
exec "$@"
"""


def opened(*files: Path) -> list[str]:
    """What a command begins with for which everybody may run this Python and envbus, and read these files.

    Skips the test where root may not mount.
    """
    python = Path(sys.executable)
    needed = [python, python.resolve(), Path(sys.base_prefix), Path(envbus.__file__), *files]
    closed = sorted(set(_closed(needed)))
    outermost = [folder for folder in closed if not set(folder.parents) & set(closed)]
    layers: list[str] = []
    for folder in outermost:
        inside = [str(other) for other in closed if folder in (other, *other.parents)]
        layers += [str(folder), " ".join(inside)]
    command = ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", *layers, "--"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        pytest.skip(f"mount namespaces are not allowed here: {tried.stderr.strip()}")
    return command


def _closed(files: Iterable[Path]) -> Iterator[Path]:
    for file in files:
        for folder in file.parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                yield folder
