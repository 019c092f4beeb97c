"""Large inputs on their way in, part by part."""

from __future__ import annotations

from envbus.bus.messages import Parts
from envbus.bus.transfer import Assembly
from envbus.errors import BadRequestError, DecodeError


class Uploads:
    """The inputs that a server is receiving.

    Args:
        max_bytes: A larger input is refused.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._assemblies: dict[str, Assembly] = {}

    def begin(self, job_id: str, parts: Parts) -> None:
        """Expect an input.

        Raises:
            BadRequestError: It is too large, or its announcement is wrong.
        """
        try:
            self._assemblies[job_id] = Assembly(parts, max_bytes=self._max_bytes)
        except DecodeError as error:
            raise BadRequestError(f"input: {error}; the limit is ENVBUS_SERVER_MAX_INPUT_BYTES") from error

    def put(self, job_id: str, index: int, data: bytes) -> Assembly | None:
        """Take in one part; returns the input with the last one. A part that came twice is fine.

        Raises:
            BadRequestError: The part is wrong.
        """
        assembly = self._assemblies.get(job_id)
        if assembly is None:
            return None
        try:
            assembly.put(index, data)
        except DecodeError as error:
            raise BadRequestError(f"input: {error}") from error
        if assembly.missing:
            return None
        return self._assemblies.pop(job_id)

    def drop(self, job_id: str) -> bool:
        """Expect it no more. True if parts of it were still missing."""
        return self._assemblies.pop(job_id, None) is not None
