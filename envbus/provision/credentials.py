"""Makes credentials: nkeys, whose seed never leaves its user, and passwords with their bcrypt hash."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

import nkeys

from envbus.errors import UsageError

BCRYPT_ROUNDS = 6
"""NATS hashes at every connect, all at once when it comes back; 190 random bits need no slow hash."""


@dataclass(frozen=True, slots=True)
class Credential:
    """One user's: the secret for the user, the other half for the configuration of NATS."""

    secret: str = field(repr=False)
    public: str


def new_nkey() -> Credential:
    """Return a new seed and its public key."""
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    return Credential(seed.decode(), public_key(seed.decode()))


def public_key(seed: str) -> str:
    """Return the public key of a user's seed.

    Raises:
        UsageError: It is not the seed of a user.
    """
    try:
        pair = nkeys.from_seed(bytearray(seed.strip().encode()))
        public: str = pair.public_key.decode()
    except (nkeys.NkeysError, ValueError, TypeError) as error:
        raise UsageError("not the seed of an nkey (SU…)") from error
    if not public.startswith("U"):
        raise UsageError("not the seed of a user's nkey (SU…)")
    return public


def new_password() -> Credential:
    """Return a new password and its hash.

    Raises:
        UsageError: bcrypt is not installed.
    """
    try:
        import bcrypt
    except ImportError as error:
        raise UsageError("hashed passwords need bcrypt: pip install 'envbus[provision]'") from error
    password = secrets.token_urlsafe(24)
    return Credential(password, bcrypt.hashpw(password.encode(), bcrypt.gensalt(BCRYPT_ROUNDS)).decode())
