"""A certificate authority for development and private networks, and what it issues to NATS and its users.

In a folder: ``ca.pem`` and ``ca.key``, ``server.pem`` and ``server.key``, ``users/NAME.pem`` and
``users/NAME.key``. A site with an authority of its own puts its files there under these names.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envbus.errors import UsageError
from envbus.provision.private_files import make_private_folder, write_private, write_public

if TYPE_CHECKING:
    from envbus.provision.authority import Authority, Issued

HOSTS = ("localhost", "127.0.0.1", "::1")
"""What every NATS server is called on its own host."""


def make(folder: Path, *, hosts: Sequence[str] = (), renew: bool = False) -> list[Path]:
    """Make the authority and the NATS server's certificate, or what of them is missing or ends soon.

    Args:
        hosts: Names and addresses by which clients reach the NATS server, beside loopback. None: as it has them.
        renew: Issue the server's certificate anew in any case.

    Returns:
        The certificates that were written.

    Raises:
        UsageError: cryptography is not installed, a name is not usable, or a file is not what it should be.
    """
    _require_cryptography()
    from envbus.provision.authority import is_good, new_authority

    try:
        make_private_folder(folder)
        written = []
        if not (folder / "ca.pem").exists():
            if (folder / "ca.key").exists():
                raise UsageError(
                    f"{folder / 'ca.key'} is there without its ca.pem; put that there, or take the key away"
                )
            _write(folder / "ca", new_authority())
            written.append(folder / "ca.pem")
        names = list(dict.fromkeys([*hosts, *HOSTS]))
        found = folder / "server.pem"
        if renew or not found.exists() or not is_good(_read(found), names if hosts else None):
            _write(folder / "server", _load(folder).for_server(names))
            written.append(found)
        return written
    except OSError as error:
        raise UsageError(f"cannot write certificates to {folder}: {error}") from error


def for_user(folder: Path, name: str, *, renew: bool = False) -> tuple[Path, Path, bool]:
    """Return the files of a user's certificate and its key, and whether they are new.

    They are issued if they are missing or end soon.

    Raises:
        UsageError: The folder lacks them, and what it takes to issue them.
    """
    stem = folder / "users" / name
    certificate, key = stem.with_name(f"{name}.pem"), stem.with_name(f"{name}.key")
    can_issue = (folder / "ca.key").exists()
    if certificate.exists() and not can_issue:
        return certificate, key, False
    if not can_issue:
        raise UsageError(
            f"no {certificate}, and no {folder / 'ca.key'} to issue it with; "
            f"put the user's certificate there, or make an authority: envbus nats certs --out {folder}"
        )
    _require_cryptography()
    from envbus.provision.authority import is_good

    is_new = renew or not certificate.exists() or not is_good(_read(certificate), None)
    if is_new:
        make_private_folder(stem.parent)
        _write(stem, _load(folder).for_user(name))
    return certificate, key, is_new


def check(folder: Path) -> None:
    """Raise UsageError if the NATS server's own files are not there."""
    for name in ("ca.pem", "server.pem", "server.key"):
        if not (folder / name).is_file():
            raise UsageError(f"no {folder / name}; make certificates: envbus nats certs --out {folder}")


def _require_cryptography() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError("certificates need the package cryptography: pip install 'envbus[provision]'")


def _load(folder: Path) -> Authority:
    from envbus.provision.authority import Authority

    return Authority(_read(folder / "ca.pem"), _read(folder / "ca.key"))


def _write(stem: Path, issued: Issued) -> None:
    write_private(stem.with_name(f"{stem.name}.key"), issued.key)
    write_public(stem.with_name(f"{stem.name}.pem"), issued.certificate)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
