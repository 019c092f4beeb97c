"""The server side: one process that serves one environment on the bus."""

from envbus.server.server import NATSEnvServer

__all__ = ["NATSEnvServer"]
