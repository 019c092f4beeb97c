"""A Python function as a tool: its definition for the model, and its arguments checked against the signature."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from envbus.errors import ToolParseError, UsageError

_ARGS_SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\s*\n)+)", re.MULTILINE)
_SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    func: Callable[..., Any]
    definition: dict[str, Any]
    """In OpenAI's form."""
    arguments: type[BaseModel]

    @classmethod
    def of(cls, func: Callable[..., Any]) -> Tool:
        """The tool for a function: types from its annotations, texts from its docstring (Google form)."""
        name = getattr(func, "__name__", "")
        if not name.isidentifier():
            raise UsageError(f"a tool must be a named function, not {func!r}")
        docstring = inspect.cleandoc(func.__doc__ or "")
        arguments = _arguments_model(name, func, _argument_texts(docstring))
        function = {
            "name": name,
            "description": _SECTION.split(docstring, maxsplit=1)[0].strip(),
            "parameters": _schema(arguments),
        }
        return cls(name, func, {"type": "function", "function": function}, arguments)

    def parse(self, text: str) -> dict[str, Any]:
        """The keyword arguments in a model's JSON, converted to the types that the function names.

        Raises:
            ToolParseError: They are not JSON or do not fit the signature.
        """
        try:
            checked = self.arguments.model_validate(json.loads(text or "{}"))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            raise ToolParseError(f"arguments of {self.name} are not valid: {problems[:1_000]}") from error
        except (ValueError, RecursionError) as error:
            raise ToolParseError(f"arguments of {self.name} are not JSON: {error}") from error
        return {name: getattr(checked, name) for name in checked.model_fields_set}


def _arguments_model(name: str, func: Callable[..., Any], texts: dict[str, str]) -> type[BaseModel]:
    hints = get_type_hints(func, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(func).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"tool {name}: parameter {parameter} cannot be called by name")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, description=texts.get(parameter.name))
        fields[parameter.name] = (hints.get(parameter.name, Any), field)
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _schema(arguments: type[BaseModel]) -> dict[str, Any]:
    schema = arguments.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _argument_texts(docstring: str) -> dict[str, str]:
    section = _ARGS_SECTION.search(docstring + "\n")
    if section is None:
        return {}
    texts: dict[str, str] = {}
    lines = inspect.cleandoc("\n" + section.group(1)).splitlines()
    for line in lines:
        if not line.startswith(" ") and (found := _ARGUMENT.match(line)):
            texts[found[1]] = found[2].strip()
        elif texts and line.strip():
            last = next(reversed(texts))
            texts[last] += " " + line.strip()
    return texts
