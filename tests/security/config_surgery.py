"""Takes a protection out of a generated nats-server configuration: changes its text, whatever wrote it."""

from __future__ import annotations

import re
from typing import Literal


def permit(config: str, public_key: str, action: Literal["publish", "subscribe"], subject: str) -> str:
    """Let a user publish or subscribe to one more subject."""
    start, end = _block_around(config, config.index(public_key))
    found = re.compile(rf'\b{action}"?\s*[:=]?\s*(?:\{{\s*"?allow"?\s*[:=]?\s*)?\[').search(config, start, end)
    assert found is not None, f"no list of subjects to {action} for {public_key}"
    return f'{config[: found.end()]}"{subject}", {config[found.end() :]}'


def let_answer(config: str, public_key: str) -> str:
    """Let a user publish wherever a message that it gets says to reply to."""
    start, end = _block_around(config, config.index(public_key))
    found = re.compile(r"\bpermissions\s*:?\s*\{").search(config, start, end)
    assert found is not None, f"no permissions of {public_key}"
    return f'{config[: found.end()]} allow_responses: {{ max: 1000, expires: "1h" }}\n{config[found.end() :]}'


def move_beside(config: str, public_key: str, other_key: str) -> str:
    """Put a user into the account of another one, without any permissions of its own: it may do all there."""
    start, end = _block_around(config, config.index(public_key))
    block, rest = _without_permissions(config[start:end]), config[:start] + config[end:]
    rest = rest[:start] + re.sub(r"^\s*,", "", rest[start:])
    place = _block_around(rest, rest.index(other_key))[0]
    return f"{rest[:place]}{block},\n{rest[place:]}"


def _without_permissions(block: str) -> str:
    found = re.search(r',?\s*"?permissions"?\s*[:=]?\s*\{', block)
    if found is None:
        return block
    return block[: found.start()] + block[_block_around(block, found.end())[1] :]


def _block_around(config: str, position: int) -> tuple[int, int]:
    """Start and end of the braces that this position is in."""
    start, depth = position, 0
    while depth >= 0:
        start -= 1
        depth += {"}": 1, "{": -1}.get(config[start], 0)
    end, depth = start + 1, 1
    while depth:
        depth += {"{": 1, "}": -1}.get(config[end], 0)
        end += 1
    return start, end


def limit(config: str, name: str, value: int) -> str:
    """Set a limit to another number, wherever it stands."""
    changed, count = re.subn(rf"\b{name}: \d+", f"{name}: {value}", config)
    assert count > 0, f"no {name} in the configuration"
    return changed
