"""The client side: call an environment that is served on the bus."""

from envbus.client.client import NATSEnvClient

__all__ = ["NATSEnvClient"]
