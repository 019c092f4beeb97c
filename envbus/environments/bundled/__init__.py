"""Environments that come with envbus; load them by their id, e.g. load_environment("reverse-text")."""
