"""Evaluation over anything that runs rollouts: generate, results on disk, resume, summary."""

from envbus.evaluation.callbacks import EvalCallbacks
from envbus.evaluation.generation import generate
from envbus.evaluation.results import load_results
from envbus.evaluation.rows import repeat_examples
from envbus.evaluation.run_paths import default_results_path, find_latest_run
from envbus.evaluation.summary import RunningStats, summarize

__all__ = [
    "EvalCallbacks",
    "RunningStats",
    "default_results_path",
    "find_latest_run",
    "generate",
    "load_results",
    "repeat_examples",
    "summarize",
]
