from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to follow the documentation in, with the commands on PATH."""
    commands, folder = tmp_path / "bin", tmp_path / "work"
    commands.mkdir()
    folder.mkdir()
    for name, module in (("envbus", "envbus.cli.main"), ("vf-eval", "envbus.cli.vf_eval")):
        script = commands / name
        script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)
    return folder
