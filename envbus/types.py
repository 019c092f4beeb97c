"""Shapes that an environment, a client and an evaluation share.

Data that crosses the bus is plain dicts and lists (TypedDicts here say their
keys); only the client configuration is a validated model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envbus.model_headers import check_headers
from envbus.model_urls import read_origin

Message = dict[str, Any]
"""One chat message in OpenAI's form: role, content, tool_calls, tool_call_id."""
Messages = list[Message]
Info = dict[str, Any]
SamplingArgs = dict[str, Any]
RewardFunc = Callable[..., Any]
"""A reward function, sync or async: a float, or for a group function a list of floats."""


class RolloutInput(TypedDict):
    """One example to roll out. Further keys of the dataset's row are kept."""

    prompt: Messages
    example_id: int | str
    answer: NotRequired[str]
    info: NotRequired[Info]
    env_id: NotRequired[str]
    """Set by EnvGroup: which of its environments the example belongs to."""


class ErrorInfo(TypedDict):
    """Why a rollout failed, in text that crosses processes."""

    error: str
    """Type name of the outermost error."""
    error_chain_repr: str
    """``repr`` of each error of the cause chain, outermost first, joined by `` -> ``."""
    error_chain_str: str
    """Type names of the chain, joined by `` -> ``."""
    error_bases: NotRequired[list[str]]
    """Names of the outermost error's classes, most derived first: retry rules match base classes."""
    retryable: NotRequired[bool]
    traceback: NotRequired[str]
    """The end of the traceback text (bounded)."""


class TokenUsage(TypedDict):
    """Tokens of a rollout's model calls, summed."""

    input_tokens: int
    output_tokens: int


class StepTokens(TypedDict):
    """Token ids of one model call, when the endpoint returns them (vLLM style)."""

    prompt_ids: list[int]
    prompt_mask: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]
    is_truncated: bool


class TrajectoryStep(TypedDict):
    """One model call of a rollout."""

    prompt: Messages
    completion: Messages
    response: dict[str, Any]
    """The chat completion as the endpoint returned it."""
    tokens: StepTokens | None
    reward: float | None
    advantage: float | None
    is_truncated: bool
    trajectory_id: str
    extras: dict[str, Any]


class RolloutTiming(TypedDict):
    """Wall-clock times of a rollout."""

    start_time: float
    """Seconds since the epoch."""
    setup_s: float
    generation_s: float
    scoring_s: float
    model_s: float
    """Time spent waiting for the model, part of generation_s."""
    total_s: float


class RolloutOutput(TypedDict, total=False):
    """The serialised outcome of one rollout; state columns are further keys."""

    example_id: int | str
    prompt: Messages
    completion: Messages
    answer: str
    info: Info
    env_id: str
    reward: float | None
    """None when the rollout failed: a failure is not a reward of 0."""
    advantage: float | None
    metrics: dict[str, float]
    timing: RolloutTiming
    is_completed: bool
    is_truncated: bool
    stop_condition: str | None
    error: ErrorInfo | None
    trajectory: list[TrajectoryStep]
    token_usage: TokenUsage | None
    tool_defs: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """What a rollout, or a group, told while it ran."""

    attempt: int
    """From 1; higher when the job was sent again, whose numbers then start at 1 anew."""
    number: int
    """1, 2, ... within the attempt: none is missing, none comes twice."""
    data: dict[str, Any]
    """What the environment reported. Multi-turn environments of envbus: ``example_id``, ``position`` (of the input in
    its group, from 0), ``turn`` (from 1) and ``messages``: those that are new since the last turn."""


OnProgress = Callable[[RolloutProgress], None]
"""Called on the caller's event loop, in order, before the call returns. What it raises is logged."""


class GenerateMetadata(TypedDict, total=False):
    """What a run was and how it went; saved as metadata.json."""

    env_id: str
    env_args: dict[str, Any]
    model: str
    base_url: str
    num_examples: int
    rollouts_per_example: int
    sampling_args: SamplingArgs
    state_columns: list[str]
    date: str
    """ISO 8601, UTC."""
    time_s: float
    num_rollouts: int
    num_failed: int
    errors_by_type: dict[str, int]
    num_invalid_rewards: int
    """Rollouts without error whose reward is NaN or infinite; left out of the means."""
    avg_reward: float | None
    """Mean over rollouts that have a finite reward; None when there is none."""
    std_reward: float | None
    avg_metrics: dict[str, float]
    pass_at_k: dict[str, float]
    pass_threshold: float
    token_usage: TokenUsage
    rollout_time_s: dict[str, float]
    """p50, p90, p99 and max of the rollouts' total time."""
    group_scoring: bool
    inputs_sha256: str
    """Digest of the inputs' ids, prompts and answers: a resume must have the same."""
    versions: dict[str, str]
    path_to_save: str | None
    save_error: str | None
    """What could not be saved, and why."""


class GenerateOutputs(TypedDict):
    """What generate() and evaluate() return."""

    outputs: list[RolloutOutput]
    """In input order; failed rollouts are in it with their error."""
    metadata: GenerateMetadata


class EndpointConfig(BaseModel):
    """One OpenAI-compatible endpoint. Holds the *name* of the key's variable, never the key."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    api_base_url: str = "https://api.openai.com/v1"
    """http or https, a plain host name or IP address; no user name, no query: see envbus.model_urls."""
    api_key_var: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)] | None = "OPENAI_API_KEY"
    """Environment variable with the key where the model is called; None for an endpoint without keys."""
    timeout: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Seconds for one model call, all its tries and the waits between them counted."""
    connect_timeout: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds for a connection; one that is not made in time is tried again."""
    max_connections: int = Field(default=1024, ge=1)
    max_keepalive_connections: int = Field(default=256, ge=0)
    max_retries: int = Field(default=5, ge=0, le=1000)
    """Tries after the first for connection errors, 408, 409, 429 and 5xx, with jittered backoff."""
    extra_headers: dict[str, str] = Field(default_factory=dict)
    """For each request; none with credentials, nor about where it goes: see envbus.model_headers."""
    on_server_host: bool = False
    """A loopback URL is meant from where each server stands. Else a server on another host refuses to call it."""

    @field_validator("api_base_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        read_origin(url)
        return url

    @field_validator("extra_headers")
    @classmethod
    def _are_allowed(cls, headers: dict[str, str]) -> dict[str, str]:
        check_headers(headers.items())
        return headers


class ClientConfig(EndpointConfig):
    """How a rollout reaches its model; crosses the bus in place of a client object."""

    client_type: Literal["openai_chat_completions"] = "openai_chat_completions"
    endpoint_configs: tuple[EndpointConfig, ...] = ()
    """Several endpoints of one model, used round robin, one per group, without those that are down; the fields above
    are then unused."""
    keep_order: bool = False
    """Use the first of endpoint_configs that is not down, instead of taking turns."""


@dataclass(frozen=True, slots=True)
class CheckedClient:
    """The client of an environment that calls models by itself (``wants_client_config``), and the word on others.

    Attributes:
        endpoint: Where the call's model is, not yet checked; None where the call named none.
        check: Returns the key to use. Raises ModelKeyError or ModelAddressError for an endpoint that may not be
            called, or not with its key.
        trusts_caller: The caller may choose what this process loads: it is of the same user.
    """

    endpoint: EndpointConfig | None
    check: Callable[[EndpointConfig], str]
    trusts_caller: bool = False


class RolloutRunner(Protocol):
    """Anything that runs rollouts: an environment here, or a client of a served one."""

    async def run_rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
    ) -> RolloutOutput:
        """Run and score one rollout. A failed rollout is an output with ``error`` set."""
        ...

    async def run_group(
        self,
        group_inputs: list[RolloutInput],
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
    ) -> list[RolloutOutput]:
        """Run rollouts of one example and score them together; outputs in input order."""
        ...


@runtime_checkable
class HostableEnvironment(RolloutRunner, Protocol):
    """What a server needs of an environment; see docs/environments.md, "Hosting protocol"."""

    @property
    def requires_group_rollouts(self) -> bool:
        """Whether scoring needs all rollouts of an example together."""
        ...

    def eval_examples(self) -> Sequence[Mapping[str, Any]]:
        """The eval set: a sized sequence of RolloutInput rows; may load data on first use."""
        ...

    async def close(self) -> None:
        """Run the teardown hooks, once."""
        ...
