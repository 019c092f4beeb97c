"""Model clients that verifiers 0.4 makes by itself: where they go, what comes back, what a client may not choose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fleet import READY_S, Fleet, importable_envs
from taskset_stock import their_client, their_request
from verifiers.v1.clients import TrainClientConfig, resolve_client
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception import server as interception

from envbus.adapters.verifiers.taskset_clients import use_our_transport
from envbus.adapters.verifiers.taskset_requests import Allowed, read_request
from envbus.errors import BadRequestError, ModelAddressError, ModelKeyError
from envbus.types import CheckedClient, ClientConfig

sys.path.append(str(Path(__file__).parent.parent / "endpoints"))
from bad_endpoint import BadEndpoint, answer, error

ENV = "probe-taskset"
DATA = {"idx": 0, "prompt": "Add 1 and 2.", "answer": "3", "do": "run"}
KEY = "sk-canary/4f+9b1c-DO-NOT-LEAK"
URL = "http://model.example/v1"


@pytest.fixture(autouse=True)
def own_envs() -> Iterator[None]:
    with importable_envs():
        yield


@pytest.fixture
def stub() -> Iterator[BadEndpoint]:
    made = BadEndpoint()
    made.open()
    yield made
    made.close()


def read(client: dict[str, Any] | None, *, trusts: bool = False, allowed: Allowed | None = None, **data: Any) -> Any:
    """What a server makes of a request of the library's client, or of one of ours without a word about the model."""
    access = CheckedClient(ClientConfig(api_base_url=URL), lambda endpoint: KEY, trusts_caller=trusts)
    fields = {"task_data": {**DATA, **data}} | ({"client": client} if client is not None else {})
    return read_request(cast(Any, fields), access, "model-of-the-call", None, allowed or Allowed())


def test_a_client_chooses_no_code_of_the_server(tmp_path: Path) -> None:
    """The library imports a custom renderer when it reads the config that names it."""
    code, ran = tmp_path / "renderer.py", tmp_path / "ran"
    code.write_text(f"open({str(ran)!r}, 'w')")
    custom = {"name": "custom", "import_path": f"{code}:Renderer"}
    with pytest.raises(BadRequestError, match="code on the server"):
        read({"type": "train", "base_url": URL, "api_key_var": "", "renderer": custom})
    assert not ran.exists()


def test_a_client_chooses_no_tokenizer_that_the_operator_did_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be downloaded, or read from this host; where none is named, the model's own is meant."""
    train = TrainClientConfig(base_url=URL, api_key_var="").model_dump(mode="json")
    for name, meant in (("owner/other", "owner/other"), ("/etc/model", "/etc/model"), (None, "model-of-the-call")):
        asked = {**train, "renderer_model_name": name}
        with pytest.raises(BadRequestError, match=rf"tokenizer of '{meant}'.*renderer_models"):
            read(asked)
        assert read(asked, allowed=Allowed(renderer_models=(meant,))).client.renderer_model_name == name
        assert read(asked, trusts=True).client.renderer_model_name == name


def test_a_client_chooses_no_folder_of_the_servers_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    inside, outside = tmp_path / "skills", tmp_path / "secrets"
    inside.mkdir()
    (inside / "way-out").symlink_to(tmp_path)
    allowed = Allowed(skill_folders=(str(inside),))
    for skill in (outside, inside / ".." / "secrets", inside / "way-out" / "secrets", f"{inside}-not", "/"):
        with pytest.raises(BadRequestError, match=r"folder of the server's host.*skill_folders") as refused:
            read(None, allowed=allowed, skills=[{"runtime": "/skills"}, str(skill)])
        assert str(tmp_path) not in str(refused.value)
        assert read(None, trusts=True, skills=[str(skill)])
    assert read(None, allowed=allowed, skills=[{"runtime": "/skills"}, str(inside / "one")])


def test_headers_and_keys_of_their_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: a header with a credential comes from a variable that is checked, never from the client."""
    monkeypatch.setenv("KEY", KEY)
    config = their_client(URL, api_key_var="KEY").model_dump(mode="json")
    for name in ("authorization", "Host", "X-Api-Key", "X\r\nA"):
        with pytest.raises(BadRequestError, match=r"client\.headers"):
            read({**config, "headers": {name: "value"}})
    assert read({**config, "headers": {"X-A": "b"}, "headers_from_env": {"X-Api-Key": "KEY"}})
    with pytest.raises(BadRequestError, match=r"client\.headers"):
        read({**config, "headers_from_env": {"Host": "KEY"}})
    with pytest.raises(BadRequestError, match=r"client\.base_url: is missing"):
        read({"type": "eval", "api_key_var": "PRIME_API_KEY"})
    for url in ("http://user:pass-word@x/v1", "http://127.1/v1"):
        with pytest.raises(BadRequestError, match="must be an http or https URL") as refused:
            read({**config, "base_url": url})
        assert "pass-word" not in str(refused.value)
    monkeypatch.setenv("KEY", f"{KEY}\n")
    with pytest.raises(ModelKeyError) as unusable:
        read(config)
    assert KEY not in str(unusable.value)


async def test_their_clients_go_to_one_origin_and_bring_no_key_back(
    stub: BadEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", KEY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Secret: value")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    use_our_transport(uses_proxies=False)
    client: Any = resolve_client(their_client(stub.url, api_key_var="KEY", headers_from_env={"X-Mine": "KEY"}))
    train: Any = resolve_client(TrainClientConfig(base_url=stub.url, api_key_var="KEY"))
    try:
        stub.will(error(401, f"Incorrect API key provided: {KEY}"))
        with pytest.raises(ProviderError, match=r"\[redacted\]") as told:
            await client._request(stub.url, {}, _headers(client))
        assert KEY not in repr(told.value) + str(told.value)
        with pytest.raises(ModelAddressError, match="alone"):
            await client._request("http://127.0.0.1:9/v1", {}, _headers(client))
        stub.will(answer({"echo": KEY}))
        assert "[redacted]" in str(await train.client.post("/x", cast_to=dict[str, Any]))
        assert not {"X-Secret", "OpenAI-Organization"} & set(stub.requests[-1].headers)
        async with interception.httpx.AsyncClient(timeout=interception.httpx.Timeout(5)) as listing:
            listed = await listing.get(f"{stub.url}/models", headers={"Authorization": f"Bearer {KEY}"})
            assert KEY not in listed.text
            with pytest.raises(ModelAddressError):
                await listing.get("http://169.254.169.254/v1/models")
    finally:
        await client.close()
        await train.close()


def _headers(client: Any) -> Any:
    return interception.httpx.Headers({"Authorization": f"Bearer {client.api_key}", **client.headers})


async def test_a_whole_episode_with_an_endpoint_that_echoes_the_key(fleet: Fleet, stub: BadEndpoint) -> None:
    """P47: neither the output nor the server's log holds it."""
    stub.will(error(401, f"Incorrect API key provided: {KEY}"))
    server = fleet.serve(ENV, None, "--allow-key", f"KEY=http://127.0.0.1:{stub.port}", KEY=KEY)
    async with fleet.client(ENV) as client:
        await client.wait_for_server(timeout_s=READY_S)
        theirs = their_request(DATA, their_client(stub.url, api_key_var="KEY"))
        ours = {"example_id": 0, "prompt": [], "task_data": DATA}
        for item, config in ((theirs, None), (ours, ClientConfig(api_base_url=stub.url, api_key_var="KEY"))):
            output = await client.run_rollout(cast(Any, item), config, "m")
            assert output["error"] is not None
            assert "[redacted]" in str(output)
            assert KEY not in str(output)
        refused = await client.run_rollout(
            cast(Any, their_request({**DATA, "skills": ["/etc"]}, their_client(stub.url, api_key_var="KEY"))), None, "m"
        )
        assert refused["error"] is not None
        assert refused["error"]["error"] == "BadRequestError"
    assert stub.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    assert KEY not in server.log
