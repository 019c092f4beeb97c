"""Values of every kind over the real bus: each arrives in its documented form, none leaves a call without an answer."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import stage_env
from stage import READY_S, Stage, do, run, settled

from envbus.error_chain import error_matches
from envbus.errors import InfraError, OverlongPromptError, RolloutError
from envbus.types import ErrorInfo

EXACT: dict[str, Any] = {
    "float32": 0.5,
    "int64": 3,
    "bool_": True,
    "float64": 1.0,
    "int_keys": {"7": "a", "null": 0, "true": 2, "0.5": 3},
    "set": [1, 2, 3],
    "frozenset": ["a", "b"],
    "tuple": [1, [2, 3]],
    "path": "/x/y",
    "aware": "2026-01-02T03:04:05+00:00",
    "naive": "2026-01-02T03:04:05",
    "decimal": "1.50",
    "uuid": "00000000-0000-0000-0000-000000000005",
    "enum": "red",
    "int_enum": 3,
    "bytes": b"\xff\x00",
    "bytearray": b"\xff\x00",
    "dataclass": {"x": 1, "y": 2.5},
    "model": {"text": "hi", "raw": b"\xff\x00"},
    "big_int": 2**70,
    "error": "ValueError('bad')",
    "inf": math.inf,
    "minus_inf": -math.inf,
}


async def odd(stage: Stage, *names: str) -> dict[str, Any]:
    async with stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        output = await asyncio.wait_for(run(client, do("odd", names=names)), 2)
        assert output["reward"] == 1.0
        await settled(client)
        values: dict[str, Any] = output["odd"]
        return values


async def test_common_python_values_have_their_documented_form(shared: Stage) -> None:
    """P28, P29, P38, P41: scalars of numpy become Python's, bytes stay bytes, keys become strings."""
    values = await odd(shared, *EXACT)
    assert values == EXACT
    assert {name: type(value) for name, value in values.items()} == {n: type(v) for n, v in EXACT.items()}


@pytest.mark.parametrize("name", ["float16_array", "zero_dim", "empty_array", "strided", "big_endian"])
async def test_arrays_keep_dtype_shape_and_values(shared: Stage, name: str) -> None:
    """P28."""
    sent = stage_env.ODD[name]()
    came = (await odd(shared, name))[name]
    assert isinstance(came, np.ndarray)
    assert came.shape == sent.shape
    assert came.dtype == sent.dtype.newbyteorder("<")
    assert (came == sent).all()


@pytest.mark.parametrize("name", ["object", "generator", "file", "recursion", "broken_model", "lambda", "surrogate"])
async def test_what_has_no_form_on_the_wire_arrives_as_text(shared: Stage, name: str) -> None:
    """P04: within a second and with everything around it whole."""
    values = await odd(shared, name, "tuple")
    assert values["tuple"] == [1, [2, 3]]
    if name == "recursion":
        assert values[name]["a"] == 1
        assert isinstance(values[name]["loop"], str)
    else:
        assert isinstance(values[name], str | dict)


async def test_an_unencodable_member_does_not_take_its_group_with_it(shared: Stage) -> None:
    """P04: one that is nested too deep for the wire fails alone, with the reason, in its place."""
    async with shared.client() as client:
        outputs = await client.run_group([do(), do("odd", names=["too_deep"]), do()], None, "m")
    assert [output["error"] is None if "error" in output else True for output in outputs] == [True, False, True]
    error = outputs[1]["error"]
    assert error is not None
    assert "odd" in error["error_chain_repr"]


@pytest.mark.parametrize("name", ["nan", "inf", "minus_inf", "float32", "float64"])
async def test_rewards_cross_the_bus_unchanged(shared: Stage, name: str) -> None:
    """P29, P28: NaN and infinities too; reward and metrics are plain floats."""
    async with shared.client() as client:
        output = await run(client, do("reward", name=name))
    sent = float(stage_env.ODD[name]())
    for value in (output["reward"], output["metrics"]["m"]):
        assert type(value) is float
        assert value == sent or (math.isnan(value) and math.isnan(sent))


async def error_of(stage: Stage, kind: str) -> ErrorInfo:
    async with stage.client() as client:
        output = await asyncio.wait_for(run(client, do("raise", kind=kind)), 3)
        assert output["reward"] is None
        await settled(client)
        error: ErrorInfo = output["error"]
        return error


async def test_an_infra_error_keeps_class_chain_and_retryable(shared: Stage) -> None:
    """P30 (a): retry rules match base classes, though the class itself is unknown here."""
    error = await error_of(shared, "sandbox")
    assert error["error"] == "SandboxError"
    assert error["error_chain_str"] == "SandboxError -> ConnectionResetError"
    assert error["retryable"] is True
    assert error_matches(error, InfraError)
    assert error_matches(error, RolloutError)
    assert not error_matches(error, OverlongPromptError)
    assert "peer hung up" in error["traceback"]


async def test_an_overlong_prompt_is_not_retryable(shared: Stage) -> None:
    """P30 (b)."""
    error = await error_of(shared, "overlong")
    assert error_matches(error, OverlongPromptError)
    assert error["retryable"] is False


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("own", "StageBrokenError"),
        ("unprintable", "UnprintableError"),
        ("long", "RuntimeError"),
        ("panic", "PanicError"),
        ("exit", "SystemExit"),
        ("cancelled", "CancelledError"),
    ],
)
async def test_whatever_an_env_raises_is_a_well_formed_error(shared: Stage, kind: str, name: str) -> None:
    """P30 (c) to (e): and the server goes on."""
    error = await error_of(shared, kind)
    assert error["error"] == name
    assert len(str(error)) < 20_000
    assert (await odd(shared, "tuple"))["tuple"] == [1, [2, 3]]
    await shared.idle()
