"""What a call asks of a taskset: a task's data, whom to ask for completions, and how. Nothing is used unchecked.

A key, or a header from a variable, may go only where the server's policy lets that variable go. What a client may not
choose (code, models and files that this process would load) is refused, unless it is of the same user.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from verifiers.v1.clients import ClientConfig as TheirClientConfig
from verifiers.v1.clients import EvalClientConfig, TrainClientConfig
from verifiers.v1.types import SamplingConfig

from envbus.adapters.verifiers.client_configs import NO_KEY_NAMES
from envbus.errors import BadRequestError, ModelKeyError, UsageError
from envbus.model_headers import check_headers
from envbus.types import CheckedClient, ClientConfig, EndpointConfig, RolloutInput, SamplingArgs

T = TypeVar("T")

CUSTOM_RENDERER = "custom"

_their_client: TypeAdapter[Any] = TypeAdapter(TheirClientConfig)


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode, as the library needs it said."""

    task_data: Mapping[str, Any]
    client: Any
    sampling: SamplingConfig


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the operator lets clients choose; see docs/verifiers.md.

    Attributes:
        renderer_models: Models whose tokenizer a ``train`` client may have loaded.
        skill_folders: Folders of this host that ``skills`` in task data may be in.
    """

    renderer_models: tuple[str, ...] = ()
    skill_folders: tuple[str, ...] = ()


NOTHING = Allowed()


def read_request(
    input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None, allowed: Allowed = NOTHING
) -> EpisodeRequest:
    """Return what a call of ours, or one of the library's own clients, asks for.

    Raises:
        BadRequestError: Something is missing, or not what the library takes.
        ModelKeyError: A variable may not be used for this endpoint.
        ModelAddressError: The endpoint is not where the client thinks it is.
    """
    fields: Mapping[str, Any] = input
    task_data = fields.get("task_data")
    if not isinstance(task_data, Mapping):
        raise BadRequestError("an input for a taskset has 'task_data', a task's data; examples() gives such inputs")
    access = client if isinstance(client, CheckedClient) else CheckedClient(_own(client), _anything, trusts_caller=True)
    theirs = fields.get("client")
    if not access.trusts_caller:
        _refuse_what_reading_takes(theirs)
        _refuse_files(task_data.get("skills"), allowed)
    config = _valid("client", _their_client.validate_python, theirs) if theirs is not None else _translated(access)
    if not access.trusts_caller:
        _refuse_models(config, model, allowed)
    _check(config, access)
    sampling = fields.get("sampling")
    sampling = _valid("sampling", SamplingConfig.model_validate, sampling_args or {} if sampling is None else sampling)
    return EpisodeRequest(task_data, config, sampling)


def is_of_their_client(input: Mapping[str, Any]) -> bool:
    """Whether an input comes from one of the library's own clients: it wants the episode, no output of ours."""
    return "client" in input


def rebuilt(env: Any, task_data: Mapping[str, Any]) -> Any:
    """The task with this data, as the taskset's own load() makes it.

    Raises:
        BadRequestError: It is not the data of such a task.
    """
    task_class = type(env.taskset).task_type()
    data = _valid("task_data", task_class.data_type().model_validate, task_data)
    return task_class(data, env.config.taskset.task)


def _own(client: Any) -> EndpointConfig | None:
    """Where the model is of a call in the caller's own process."""
    if isinstance(client, ClientConfig) and client.endpoint_configs:
        return client.endpoint_configs[0]
    if client is None or isinstance(client, EndpointConfig):
        return client
    raise UsageError(f"a taskset calls the model by itself: pass a ClientConfig, not a {type(client).__name__}")


def _translated(access: CheckedClient) -> Any:
    """Our config as the library's."""
    endpoint = access.endpoint
    if endpoint is None:
        raise BadRequestError("a taskset's episodes call a model, but the call named none: pass a client")
    return EvalClientConfig(
        base_url=endpoint.api_base_url,
        api_key_var=endpoint.api_key_var or "",
        headers=dict(endpoint.extra_headers),
        timeout={"connect": endpoint.connect_timeout, "read": endpoint.timeout},
    )


def _refuse_what_reading_takes(theirs: Any) -> None:
    """Before the library reads a config: it imports a custom renderer, and looks here for a URL that is missing."""
    if isinstance(theirs, Mapping) and "base_url" not in theirs:
        raise BadRequestError("client.base_url: is missing")
    renderer = theirs.get("renderer") if isinstance(theirs, Mapping) else None
    if isinstance(renderer, Mapping) and renderer.get("name") == CUSTOM_RENDERER:
        raise BadRequestError("client.renderer: a custom one is code on the server, which no client may choose")


def _refuse_models(config: Any, model: str, allowed: Allowed) -> None:
    """The tokenizer that a training client renders with: downloaded, or read from a path of this host."""
    if not isinstance(config, TrainClientConfig):
        return
    name = config.renderer_model_name or model
    if name not in allowed.renderer_models:
        raise BadRequestError(
            f"client.renderer_model_name: this server may not load the tokenizer of {name[:200]!r}; its operator can "
            f"allow it: envbus serve -x '{{\"renderer_models\": [...]}}'"
        )


def _refuse_files(skills: Any, allowed: Allowed) -> None:
    """Folders of this host, which would be handed to the agent. Those of its own runtime are not meant."""
    for skill in skills if isinstance(skills, list) else [skills] if skills else []:
        if isinstance(skill, Mapping):
            continue
        folder = os.path.realpath(str(skill))
        if not any(os.path.commonpath([folder, own]) == own for own in map(os.path.realpath, allowed.skill_folders)):
            raise BadRequestError(
                "task_data.skills: names a folder of the server's host, which clients may not choose; its operator can "
                "allow some: envbus serve -x '{\"skill_folders\": [...]}'"
            )


def _check(config: Any, access: CheckedClient) -> None:
    if not access.trusts_caller:
        _check_headers(config)
    for variable in (config.api_key_var, *config.headers_from_env.values()):
        is_none = variable in NO_KEY_NAMES and not os.environ.get(variable)
        on_server_host = access.endpoint is not None and access.endpoint.on_server_host
        try:
            endpoint = EndpointConfig(
                api_base_url=config.base_url,
                api_key_var=None if is_none else variable,
                on_server_host=on_server_host,
            )
        except ValidationError as error:
            raise BadRequestError(f"client: {_said(error)}") from error
        key = access.check(endpoint)
        if not is_none and not access.trusts_caller and key != os.environ.get(variable):
            # The library sends it as it is, and an error of its would quote it.
            raise ModelKeyError(
                f"the value of {variable} has spaces or line ends around it: the library cannot send it"
            )


def _check_headers(config: Any) -> None:
    try:
        check_headers(config.headers.items())
        check_headers(((name, "") for name in config.headers_from_env), credentials=True)
    except ValueError as error:
        raise BadRequestError(f"client.headers: {error}") from None


def _anything(endpoint: EndpointConfig) -> str:
    """In the caller's own process its keys are its own."""
    return ""


def _valid(name: str, validate: Callable[[Any], T], value: Any) -> T:
    try:
        return validate(value)
    except ValidationError as error:
        raise BadRequestError(f"{name}{_said(error)}") from None


def _said(error: ValidationError) -> str:
    """What is wrong, without the values: they may be secret."""
    each = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f".{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in each[:5])
