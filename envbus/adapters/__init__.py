"""Environments and tools of other libraries on the bus. Each library is imported only by the module that needs it."""
