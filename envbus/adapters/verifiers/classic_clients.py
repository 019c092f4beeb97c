"""Model clients in the classic library's own form, around ours: which keys are used where stays our decision."""

from __future__ import annotations

import weakref
from typing import Any

from envbus.environments.model_client import resolve_client
from envbus.errors import UsageError


class ClassicClients:
    """One client of the library's per AsyncOpenAI, for as long as a rollout has it."""

    def __init__(self) -> None:
        self._clients: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        try:
            from verifiers.clients import OpenAIChatCompletionsClient
        except ModuleNotFoundError as error:
            if error.name not in ("verifiers", "verifiers.clients"):
                raise
            self._kind: Any = None  # in 0.1.10 rollouts take the AsyncOpenAI itself
        else:
            self._kind = OpenAIChatCompletionsClient

    def get(self, client: Any) -> Any:
        """What a rollout calls its model with.

        Args:
            client: Our AsyncOpenAI, a ClientConfig of ours, or None where the call names no model.
        """
        client = NoModel() if client is None else resolve_client(client)
        if self._kind is None:
            return client
        wrapped = self._clients.get(id(client))  # alive, so its AsyncOpenAI is, and no other has that id
        if wrapped is None:
            self._clients[id(client)] = wrapped = self._kind(client)
        return wrapped


class NoModel:
    """In place of a model client: using it fails with a word about why."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError("this environment calls a model, but the call named none: pass a client")
