"""``python -m envbus``: the same as the ``envbus`` command."""

from __future__ import annotations

import sys

from envbus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
