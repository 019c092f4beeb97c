"""The byte fuzzers by hand, for as long as you like: ``python -m tests.fuzz --seconds 60 --seed 7``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from byte_fuzz import Report, check_announcements, check_bombs, check_bytes, random_inputs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.seconds:g} s", flush=True)
    report, rng = Report(), random.Random(options.seed)
    peaks = check_bombs(report)
    until = time.monotonic() + options.seconds
    inputs = random_inputs(rng)
    while time.monotonic() < until and not report.broken:
        check_bytes(next(inputs), report)
        check_announcements(rng, report)
    print(
        f"{report.inputs:,} inputs: {report.decoded:,} decoded, {report.parsed:,} messages; "
        f"slowest {report.slowest_s:.3f} s, peak of a bomb {max(peaks.values()) / 2**20:.1f} MiB"
    )
    for broken in report.broken:
        print(broken)
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
