"""Heartbeats for tests of the fleet view."""

from __future__ import annotations

from typing import Any

from envbus.bus.control_messages import ControllerBeat, EnvReport, ProcessReport
from envbus.bus.messages import Beat


def beat(server: str = "a1", env: str = "gsm8k", **fields: Any) -> Beat:
    defaults: dict[str, Any] = {
        "state": "ready", "host": "h1", "pid": 1, "started_at": 1000.0, "slots": 4, "in_flight": 0,
        "waiting_clients": 0, "waiting_jobs": 0, "held_results": 0, "held_bytes": 0, "done": 0, "failed": 0,
        "cancelled": 0, "busy": 0, "loop_lag_s": 0.0, "oldest_job_s": 0.0, "rss_bytes": 1, "env_id": env,
        "versions": {"envbus": "1"}, "fingerprint": "f1", "interval_s": 1.0,
    }  # fmt: skip
    return Beat(server=server, env=env, **(defaults | fields))


def process(server: str = "a1", env: str = "gsm8k", **fields: Any) -> ProcessReport:
    defaults: dict[str, Any] = {"slot": 0, "generation": 1, "pid": 1, "state": "running"}
    return ProcessReport(server=server, env=env, **(defaults | fields))


def controller_beat(controller: str = "c1", **fields: Any) -> ControllerBeat:
    defaults: dict[str, Any] = {
        "host": "h1", "pid": 9, "version": "1", "started_at": 1000.0,
        "envs": [EnvReport(env="gsm8k", env_id="gsm8k", replicas=2)],
    }  # fmt: skip
    return ControllerBeat(controller=controller, **(defaults | fields))
