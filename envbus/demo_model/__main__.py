"""``python -m envbus.demo_model``: serve the demo model until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from envbus.demo_model.endpoint import DEFAULT_CONTEXT_LENGTH, DEFAULT_MODEL, DemoModel
from envbus.errors import UsageError


def main() -> int:
    """Run the endpoint; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m envbus.demo_model", description="An OpenAI-compatible stub.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (default)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the name it lists (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same answers (default: %(default)s)")
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds before each answer (default: 0)")
    parser.add_argument("--context-length", type=int, default=DEFAULT_CONTEXT_LENGTH, help="most tokens of a call")
    options = vars(parser.parse_args())
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        with DemoModel.start(**options) as demo:
            sys.stdout.write(f"{demo.base_url}\n")
            sys.stdout.flush()
            stopped.wait()
    except UsageError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
