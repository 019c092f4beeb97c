"""The command line: ``envbus`` and ``vf-eval``."""
