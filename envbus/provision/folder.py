"""The folder of one NATS: its configuration, each user's credentials, and the contexts to connect with.

Keeps what it finds: run again it makes only what is missing, so users who come later disturb
nobody. Secrets may be moved away once handed over; the public halves, ``users/NAME.pub``, stay.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbus.errors import UsageError
from envbus.provision import certificates
from envbus.provision.access import AccessSpec, User
from envbus.provision.credentials import new_nkey, new_password, public_key
from envbus.provision.nats_conf import render
from envbus.provision.private_files import make_private_folder, write_private, write_public

CONFIG_FILE = "nats.conf"


@dataclass(slots=True)
class Provisioned:
    """What provision() did.

    Attributes:
        config_file: For ``nats-server -c``.
        made: Users with new credentials.
        kept: Users whose credentials were there already.
        renewed: Users who keep their credentials but have a new certificate.
        left: Users whose files are there though the access no longer names them.
    """

    config_file: Path
    made: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def provision(spec: AccessSpec, folder: Path, rotate: Collection[str] = ()) -> Provisioned:
    """Write the configuration, and credentials and a context for each user.

    Args:
        rotate: Users who get new credentials in place of those that they have.

    Raises:
        UsageError: A file cannot be written or is not what it should be, or a user in ``rotate`` is unknown.
    """
    known = {user.name for user in spec.users}
    for name in rotate:
        if name not in known:
            raise UsageError(f"cannot rotate {name!r}: no such user; there are {', '.join(sorted(known))}")
    if spec.tls is not None:
        certificates.check(spec.tls.certificates)
    try:
        return _provision(spec, folder, rotate)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error}") from error


def _provision(spec: AccessSpec, folder: Path, rotate: Collection[str]) -> Provisioned:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("users", "contexts"):
        make_private_folder(folder / name)
    done = Provisioned(folder / CONFIG_FILE)
    public: dict[str, str] = {}
    for user in spec.users:
        is_new = user.name in rotate
        files = _UserFiles(spec, user, folder)
        kept = None if is_new else files.kept()
        public[user.name] = kept or files.make()
        (done.made if kept is None else done.kept).append(user.name)
        if files.write_context(new_certificate=is_new) and kept is not None:
            done.renewed.append(user.name)
    done.left += sorted(file.stem for file in (folder / "users").glob("*.pub") if file.stem not in public)
    write_public(done.config_file, render(spec, public))
    return done


class _UserFiles:
    """The files of one user."""

    def __init__(self, spec: AccessSpec, user: User, folder: Path) -> None:
        self._spec = spec
        self._user = user
        self._by_nkey = spec.credentials == "nkeys"
        self._context = folder / "contexts" / f"{user.name}.json"
        self._seed = folder / "users" / f"{user.name}.nk"
        self._public = folder / "users" / f"{user.name}.pub"
        self._password: str | None = None

    def kept(self) -> str | None:
        """The public half of the credentials that are there."""
        if self._by_nkey and self._seed.exists():
            return self._of_seed()
        public = self._kept_public()
        return public if public and public.startswith("U" if self._by_nkey else "$2") else None

    def _of_seed(self) -> str:
        try:
            public = public_key(self._seed.read_text(encoding="utf-8"))
        except (UsageError, UnicodeDecodeError) as error:
            raise UsageError(f"{self._seed}: {error}; to make a new one: --rotate {self._user.name}") from error
        if self._kept_public() != public:  # not there yet, or a rotation was cut short
            write_public(self._public, public + "\n")
        return public

    def _kept_public(self) -> str | None:
        return self._public.read_text(encoding="utf-8").strip() if self._public.exists() else None

    def make(self) -> str:
        """Make new credentials; their public half."""
        credential = new_nkey() if self._by_nkey else new_password()
        if self._by_nkey:
            write_private(self._seed, credential.secret)
        else:
            self._password = credential.secret
            self._seed.unlink(missing_ok=True)
        write_public(self._public, credential.public + "\n")
        return credential.public

    def write_context(self, *, new_certificate: bool) -> bool:
        """Write what the NATS CLI calls a context; none for a user whose password was taken from here.

        Returns whether the user has a new certificate.
        """
        has_new = False
        user, tls = self._user, self._spec.tls
        settings: dict[str, Any] = {"description": f"envbus {user.role} {user.name}", "url": self._spec.client_url}
        if self._by_nkey:
            settings["nkey"] = self._relative(self._seed)
        else:
            password = self._password or self._kept_password()
            if password is None:
                return False
            settings |= {"user": user.name, "password": password}
        if tls is not None:
            certificate, key, has_new = certificates.for_user(tls.certificates, user.name, renew=new_certificate)
            settings |= {"ca": self._relative(tls.certificates / "ca.pem")}
            settings |= {"cert": self._relative(certificate), "key": self._relative(key)}
            settings |= {"tls_first": True} if tls.handshake_first else {}
        settings["inbox_prefix"] = user.inbox_prefix
        write_private(self._context, json.dumps(settings, indent=2) + "\n")
        return has_new

    def _kept_password(self) -> str | None:
        try:
            found = json.loads(self._context.read_text(encoding="utf-8"))["password"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return found if isinstance(found, str) else None

    def _relative(self, file: Path) -> str:
        """A path as seen from the context's own folder: the whole may be moved or copied."""
        return os.path.relpath(file, self._context.parent)
