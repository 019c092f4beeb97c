"""Environments and tools made for the library `verifiers`; the only importer of it."""

from envbus.adapters.verifiers.attach import attach

__all__ = ["attach"]
