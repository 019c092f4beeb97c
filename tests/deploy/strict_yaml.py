"""Reads YAML as its authors mean it: a key that is there twice is an error, where PyYAML takes the last."""

from __future__ import annotations

from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many times faster, where PyYAML was built with libyaml


def read_all(text: str) -> list[Any]:
    """All documents of a text.

    Raises:
        yaml.YAMLError: It is not YAML, or has a key twice.
    """
    for node in yaml.compose_all(text, LOADER):
        _check(node)
    return [document for document in yaml.load_all(text, LOADER) if document is not None]


def read(text: str) -> Any:
    """The one document of a text."""
    (document,) = read_all(text)
    return document


def _check(node: Any) -> None:
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check(each)
    elif isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        for key, value in node.value:
            if keys.count(key.value) > 1:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice")
            _check(value)
