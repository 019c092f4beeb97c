"""A check-up of permissions is no trouble for the servers that meet its probes."""

from __future__ import annotations

from pathlib import Path

from operator_site import Site


def test_a_check_up_leaves_no_warning_in_a_servers_log(site: Site, tmp_path: Path) -> None:
    log_file = tmp_path / "server.log"
    site.serve(["reverse-text", "--log-file", str(log_file)])
    ended = site.run("doctor", "--role", "trainer", "--role", "operator")
    assert ended.code == 0, ended.err + ended.out
    assert site.run("call", "reverse-text", "--demo-model").code == 0, "the slots are given back"
    said = log_file.read_text()
    assert "is ready" in said
    assert "WARNING" not in said
    assert "refused" not in said
