"""The code of the documentation and the examples run, in order, with a real bus and the demo model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from doc_pages import PAGES, ROOT, blocks
from doc_runs import follow, run_process, served

from envbus import DemoModel
from envbus.bus.embedded import EmbeddedNats

EXAMPLES = {
    "sidecar.py": "12 rollouts, reward 0.",
    "by_hand.py": "15 rollouts, reward 0.",
    "train_client.py": "20 rollouts, reward 0.",
    "plain_request.py": "</reversed_text> reward: ",
    "grpo.py": "2 of 2 policies improved",
}
RUNNABLE = [page for page in PAGES if any(block.mark in ("run", "script") for block in blocks(page))]


@pytest.mark.parametrize("page", RUNNABLE)
async def test_the_blocks_of_a_page_run(
    page: str, reader: Path, own_nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks marked ``file=`` are written, ``run`` are run in one namespace, ``script`` in a process."""
    monkeypatch.syspath_prepend(str(reader))
    namespace: dict[str, Any] = {"__name__": "docs"}
    try:
        async with served("reverse-text", own_nats.url):
            for block in blocks(page):
                await follow(block, reader, namespace, own_nats.url)
    finally:
        if "demo" in namespace:
            namespace["demo"].stop()


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_is_marked(page: str) -> None:
    unmarked = [block.place for block in blocks(page, "python") if not block.mark]
    assert not unmarked, "mark them run, script or file=NAME, or make them text"


@pytest.mark.parametrize(("example", "says"), sorted(EXAMPLES.items()))
async def test_an_example_runs(example: str, says: str, reader: Path, own_nats: EmbeddedNats) -> None:
    """Each with a NATS server of its own: they use the default prefix."""
    with DemoModel.start() as demo:
        async with served("reverse-text", own_nats.url), served("guess-number", own_nats.url):
            output = await run_process(
                sys.executable,
                str(ROOT / "examples" / example),
                demo.base_url,
                place=example,
                environ={"ENVBUS_URL": own_nats.url},
            )
    assert says in output


def test_every_example_is_run() -> None:
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
