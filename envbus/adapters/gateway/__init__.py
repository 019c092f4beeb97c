"""The ZMQ sockets of verifiers' own servers, in front of a fleet: its clients connect unchanged."""
