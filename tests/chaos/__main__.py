"""Runs the chaos harness by hand: ``python -m tests.chaos --minutes 10 --seed 7``."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chaos_run import LONG, SHORT, NotWarmError, as_lines, chaos
from chaos_stage import Sizes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long faults go on (default: 1)")
    parser.add_argument("--seed", type=int, default=7, help="the same seed makes the same plan (default: 7)")
    parser.add_argument("--servers", type=int, default=3, help="server processes (default: 3)")
    parser.add_argument("--managed", type=int, default=2, help="servers of the controller (default: 2)")
    parser.add_argument("--clients", type=int, default=3, help="client processes (default: 3)")
    parser.add_argument("--short", action="store_true", help="faults as short as in the test suite's run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file too")
    parser.add_argument("--folder", type=Path, help="where ledgers and logs go (default: a new temporary folder)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    is_short = arguments.short or arguments.minutes < 3
    sizes = Sizes(arguments.servers, arguments.managed, arguments.clients, hold_s=20.0 if is_short else 60.0)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="envbus-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"ledgers and logs are in {folder}", flush=True)
    run = chaos(
        folder.resolve(),
        seed=arguments.seed,
        duration_s=arguments.minutes * 60,
        scale=SHORT if is_short else LONG,
        sizes=sizes,
        say=lambda line: print(line, flush=True),
    )
    try:
        report = asyncio.run(run)
    except NotWarmError as error:
        print(f"stopped before the faults: {error}")
        return 2
    print("\n".join(as_lines(report)))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
