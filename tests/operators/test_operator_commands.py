"""The commands of an operator against real servers of ``envbus serve``."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from cli_forks import CliForks
from operator_site import QUICK, Cli, Ended, Site, as_json, wait_for_line

from envbus.bus.embedded import EmbeddedNats


def test_ls_shows_envs_and_servers(shared: Site) -> None:
    ended, everything, one = shared.run_all(["ls"], ["ls", "--json"], ["ls", "reverse-text", "--json"])
    assert ended.code == 0, ended.err
    for word in ("probe", "reverse-text", "1 ready", "ready", "slots", "in flight", "waiting", "rate", "errors", "age"):
        assert word in ended.out
    view = as_json(everything)
    assert [env["env"] for env in view["envs"]] == ["probe", "reverse-text"]
    assert [server["slots"] for server in view["servers"]] == [3, 64]
    assert view["servers"][0]["rate_per_s"] == 0.0, "two beats were heard"
    assert abs(view["servers"][0]["clock_ahead_s"]) < 1
    assert [server["env"] for server in as_json(one)["servers"]] == ["reverse-text"]


IMPOSSIBLE = [
    (("ls", "prob"), ["'prob'", "envs: probe, reverse-text", "did you mean 'probe'"]),
    (("drain", "nothing"), ["envs: probe, reverse-text"]),
    (("scale", "probe", "3"), ["no controller runs env 'probe'", "envbus up"]),
    (("stop",), ["--all"]),
    (("stop", "probe", "--all"), ["--all"]),
    (("logs", "nothing"), ["envs: probe, reverse-text"]),
    (("call", "prob", "--demo-model"), ["did you mean 'probe'"]),
    (("call", "probe", "--demo-model", "-i", "99"), ["-i/--index 99", "has 3 examples"]),
    (("call", "probe", "--demo-model", "-k", "KEY"), ["--demo-model", "-k/--api-key-var"]),
    (("doctor", "--role", "nobody"), ["trainer, server, operator, controller, dashboard"]),
    (("top",), ["needs a terminal", "envbus ls"]),
]


@pytest.fixture(scope="module")
def refused(shared: Site) -> list[Ended]:
    """What each of IMPOSSIBLE came to."""
    return shared.run_all(*(command for command, _ in IMPOSSIBLE))


@pytest.mark.parametrize("number", range(len(IMPOSSIBLE)), ids=lambda number: " ".join(IMPOSSIBLE[number][0]))
def test_what_cannot_be_done_is_one_line(refused: list[Ended], number: int) -> None:
    ended, words = refused[number], IMPOSSIBLE[number][1]
    assert ended.code == 2
    [line] = ended.err.splitlines()
    assert line.startswith("error[")
    for word in words:
        assert word in line
    assert ended.out == ""


def test_an_empty_bus_says_how_to_start(site: Site) -> None:
    ended, ping = site.run_all(["ls"], ["ping"])
    assert ended.code == 0
    assert "envbus serve, or envbus up" in ended.out
    assert ping.code == 2


def test_info(shared: Site) -> None:
    ended, probe, by_id = shared.run_all(
        ["info", "reverse-text"], ["info", "probe", "--json"], ["info", "probe-env", "--json"]
    )
    assert ended.code == 0
    for word in ("fingerprint", "python version", "eval examples", "200", "no controller runs it"):
        assert word in ended.out
    assert as_json(probe)["fleet"]["states"] == {"ready": 1}
    assert as_json(by_id)["env"] == "probe", "an env id stands for its env"


def test_ping(shared: Site) -> None:
    ended, two = shared.run_all(["ping"], ["ping", "probe", "-c", "2", "--json"])
    assert ended.code == 0
    assert len([line for line in ended.out.splitlines() if " ms" in line]) == 2
    [answer] = as_json(two)
    assert len(answer["round_trips_s"]) == 2
    assert answer["error"] is None


def test_call_shows_messages_and_reward(shared: Site) -> None:
    own = json.dumps({"prompt": [{"role": "user", "content": "Reverse ab."}], "answer": "ba", "info": {"word": "ab"}})
    ended, own_input = shared.run_all(
        ["call", "reverse-text", "--demo-model", "-i", "2"],
        ["call", "probe", "--demo-model", "--input", own, "--json"],
    )
    assert ended.code == 0, ended.err
    for word in ("user: ", "assistant: ", "reward: ", "<reversed_text>"):
        assert word in ended.out
    output = as_json(own_input)
    assert (output["reward"], output["prompt"][-1]["content"]) == (1.0, "Reverse ab.")


def test_a_failed_rollout_of_call_is_exit_code_1(shared: Site) -> None:
    ended = shared.run("call", "reverse-text", "-b", "http://127.0.0.1:9/v1", "-k", "NO_SUCH_KEY")
    assert ended.code == 1
    assert "failed: " in ended.out
    assert "NO_SUCH_KEY" in ended.out


def test_logs(shared: Site) -> None:
    ended, refused = shared.run_all(["logs", "probe", "-n", "2"], ["logs", "reverse-text"])
    assert ended.code == 0, ended.err
    assert len(ended.out.splitlines()) == 2
    assert "is ready, 3 slots" in ended.out
    assert refused.code == 1
    assert "--log-file" in refused.err
    told = shared.run("logs", "probe", "--level", "info")
    assert told.code == 0, told.err
    assert "operator: log_level 'info'" in told.out


def test_logs_follow_until_the_server_has_ended(site: Site, tmp_path: Path) -> None:
    server, interrupted = site.serve(
        *(["probe-env", "--name", name, "--log-file", str(tmp_path / f"{name}.log")] for name in ("probe", "other"))
    )
    follow = site.start("logs", "probe", "-f", until="is ready")
    assert site.run("call", "probe", "--demo-model").code == 0
    server.terminate()
    wait_for_line(follow, "the server has ended", stream="stderr")
    assert follow.wait(60) == 0
    follow = site.start("logs", "other", "-f", until="is ready")
    follow.send_signal(signal.SIGINT)
    assert follow.wait(60) == 0
    assert interrupted.poll() is None


def test_drain_waits_shows_what_is_left_and_ends_the_server(site: Site, tmp_path: Path) -> None:
    """P19: a drained server takes no new calls, and the results of those it has are delivered."""
    hold = tmp_path / "hold"
    hold.touch()
    [server] = site.serve(["probe-env", "--name", "probe", "-a", json.dumps({"hold_while": str(hold)})])
    run = site.start(
        "eval", "probe-env", "--name", "probe", "--address", site.url, "--demo-model", "-n", "2", "-r", "1", "--json",
        until="to run", stream="stderr",
    )  # fmt: skip
    site.until(lambda view: view["totals"]["in_flight"] == 2, limit_s=60)
    early = site.run("drain", "probe", "--timeout", "0")
    assert early.code == 1
    found = re.search(r"still there: (\w{32})", early.out)
    assert found, early.out
    drain = site.start("drain", found[1][:6], until="2 rollouts in flight")
    hold.unlink()
    out, err = drain.communicate(timeout=60)
    assert drain.returncode == 0, err
    assert "1 server has ended" in out
    server.communicate(timeout=60)
    assert server.returncode == 0
    out, _ = run.communicate(timeout=60)
    assert json.loads(out)["num_failed"] == 0


def test_stop_all(site: Site) -> None:
    servers = site.serve(*(["probe-env", "--name", f"probe-{number}"] for number in range(2)))
    assert site.json("stop", "--all") == {"ended": 2, "left": []}
    for server in servers:
        server.communicate(timeout=60)
        assert server.returncode == 0


def test_doctor_is_content(shared: Site) -> None:
    ended = shared.run("doctor", "--role", "operator", "--role", "trainer")
    assert ended.code == 0, ended.out
    for word in ("max_payload", "permissions as trainer", "clocks", "versions", "round trip to servers", "all fine"):
        assert word in ended.out
    assert shared.json("ls")["totals"]["in_flight"] == 0, "it left nothing behind"
    assert shared.run("call", "probe", "--demo-model").code == 0


RIGHTS = """
max_payload: 32KB
authorization {{
  users = [
    {{ user: ops, password: x }}
    {{
      user: trainer, password: x
      permissions {{
        publish: ["{prefix}.*.rollout", "{prefix}.*.info", "{prefix}.*.wait", "{prefix}.*.server.*"]
        subscribe: ["_INBOX.>", "{prefix}.*.beat.*", "{prefix}.*.gone"]
      }}
    }}
  ]
}}
"""


async def test_doctor_names_what_is_denied_and_too_small(tmp_path: Path, cli_forks: CliForks) -> None:
    """The subject, the right and the change are named, before a run finds out."""
    async with EmbeddedNats(config=RIGHTS.format(prefix="env")) as nats:
        trainer, ops, wrong = (
            ["--address", nats.url.replace("//", f"//{who}@")] for who in ("trainer:x", "ops:x", "trainer:wrong")
        )
        ended, as_operator, full, unknown = Cli(tmp_path, cli_forks).run_all(
            [
                ["doctor", "--role", "trainer", "--json", *trainer],
                ["doctor", "--role", "operator", *trainer],
                ["doctor", "--json", *ops],
                ["doctor", *wrong],
            ],
            variables=QUICK,
        )
        assert ended.code == 1, ended.err
        found = {finding["check"]: finding for finding in json.loads(ended.out)}
        assert found["permissions as trainer"]["level"] == "failed"
        assert found["permissions as trainer"]["found"] == "denied: publish env.doctor.examples"
        assert "grant: publish env.doctor.examples" in found["permissions as trainer"]["advice"]
        assert found["permissions as server"]["level"] == "note"
        assert "subscribe env.doctor.ctl.*" in found["permissions as server"]["found"]
        assert found["max_payload"]["level"] == "failed"
        assert "max_payload: 1MB" in found["max_payload"]["advice"]
        assert "failed  permissions as operator: denied: subscribe envctl.beat.*" in as_operator.out
        levels = {finding["check"]: finding["level"] for finding in json.loads(full.out)}
        assert {
            levels[f"permissions as {role}"] for role in ("trainer", "server", "operator", "controller", "dashboard")
        } == {"ok"}
        assert unknown.code == 2
        assert "error[bus_auth]" in unknown.err
