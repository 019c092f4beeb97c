"""Well-known model providers, and which endpoint and key a run uses (pure but for looking whether a key is set)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from envbus.errors import UsageError
from envbus.model_urls import read_origin
from envbus.types import ClientConfig


@dataclass(frozen=True, slots=True)
class Provider:
    """An OpenAI-compatible endpoint."""

    base_url: str
    key_var: str
    key_needed: bool = True


PROVIDERS: Mapping[str, Provider] = {
    "prime": Provider("https://api.pinference.ai/api/v1", "PRIME_API_KEY"),
    "openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "anthropic": Provider("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "minimax": Provider("https://api.minimax.chat/v1", "MINIMAX_API_KEY"),
    "glm": Provider("https://open.bigmodel.cn/api/paas/v4", "GLM_API_KEY"),
    "local": Provider("http://localhost:8000/v1", "VLLM_API_KEY", key_needed=False),
    "vllm": Provider("http://localhost:8000/v1", "VLLM_API_KEY", key_needed=False),
}
DEFAULT_PROVIDER = "prime"
DEFAULT_MODEL = "openai/gpt-4.1-mini"


def choose_endpoint(
    provider: str | None, base_url: str | None, key_var: str | None, *, extra_headers: dict[str, str], keys_here: bool
) -> ClientConfig:
    """Where the model is and which variable holds its key.

    A provider's key goes to that provider only: a base URL of one's own needs ``-k`` for a key, unless ``-p`` says
    that it belongs to the provider.

    Args:
        provider: ``-p``.
        base_url: ``-b``.
        key_var: ``-k``.
        extra_headers: For each request.
        keys_here: Whether keys are read on this host, so that a missing one can be told at once.

    Raises:
        UsageError: The provider is unknown, the URL is none, or the key is not set.
    """
    if provider is not None and provider not in PROVIDERS:
        raise UsageError(f"-p/--provider {provider!r} is unknown; use one of {', '.join(PROVIDERS)}, or -b URL")
    known = PROVIDERS[provider or DEFAULT_PROVIDER]
    if base_url is not None:
        _check_url(base_url)
    variable = key_var
    if key_var is None and (base_url is None or provider is not None):
        unset = keys_here and not os.environ.get(known.key_var)
        variable = None if unset and not known.key_needed else known.key_var
    if keys_here and variable and not os.environ.get(variable):
        raise UsageError(
            f"the API key variable {variable} is not set; set it, choose another endpoint with -p or -b and -k, "
            "or add --demo-model to try without a model"
        )
    return ClientConfig(
        api_base_url=base_url or known.base_url, api_key_var=variable or None, extra_headers=extra_headers
    )


def _check_url(base_url: str) -> None:
    try:
        read_origin(base_url)
    except ValueError as error:
        raise UsageError(f"-b/--api-base-url {error}") from None
