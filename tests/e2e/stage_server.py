"""Serves an environment as told by the JSON in its argument: one server process of an end-to-end test."""

from __future__ import annotations

import json
import sys

from envbus import NATSEnvServer, ServerSettings
from envbus.bus.lifeline import inherited_lifeline


def main() -> None:
    spec = json.loads(sys.argv[1])
    settings = ServerSettings(**spec.pop("settings"))
    NATSEnvServer.run_server(**spec, settings=settings, lifeline_fd=inherited_lifeline())


if __name__ == "__main__":
    main()
