"""The rows of a Hugging Face dataset as the inputs that the classic library makes of them, read one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload


class ClassicExamples(Sequence[dict[str, Any]]):
    """Plain dicts: images and the like stay encoded, as in ``Dataset.to_list()``.

    Args:
        dataset: A datasets.Dataset; later shuffles of its environment do not show here.
    """

    def __init__(self, dataset: Any) -> None:
        self._rows = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        row: dict[str, Any] = self._rows[number : number + 1].to_pylist()[0]
        return row
