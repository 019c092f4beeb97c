"""``envbus nats``: writes what a shared NATS server needs: its configuration, credentials, certificates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from envbus.provision.access import AccessSpec
    from envbus.provision.folder import Provisioned

nats_app = typer.Typer(help="Make a NATS server fit to share: who may do what, credentials, certificates.")


def _names(flag: str, what: str) -> Any:
    return typer.Option(flag, metavar="NAME,...", help=what)


@nats_app.command("conf")
def conf(
    access_file: Annotated[
        Path | None, typer.Argument(metavar="[ACCESS.TOML]", help="Who is on the bus. Options win over it.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to.")] = Path("access"),
    trainers: Annotated[str | None, _names("--trainers", "Users who run rollouts.")] = None,
    servers: Annotated[str | None, _names("--servers", "Users that serve environments.")] = None,
    operators: Annotated[
        str | None, _names("--operators", "Users who look and give orders: drain, scale, stop.")
    ] = None,
    controllers: Annotated[str | None, _names("--controllers", "Users that run `envbus up`.")] = None,
    dashboards: Annotated[str | None, _names("--dashboards", "Users that only look.")] = None,
    accounts: Annotated[
        bool | None, typer.Option("--accounts/--one-account", help="An account of its own for each trainer.")
    ] = None,
    passwords: Annotated[
        bool | None, typer.Option("--passwords/--nkeys", help="Passwords instead of nkeys. Default: nkeys.")
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option("--tls", metavar="DIR", help="Certificates, as `envbus nats certs` makes them. Default: no TLS."),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Address that clients connect to. Default: this host's loopback.")
    ] = None,
    prefix: Annotated[str | None, typer.Option("--prefix", help="First token of all NATS subjects.")] = None,
    rotate: Annotated[
        list[str], typer.Option("--rotate", metavar="USER", help="New credentials for this user. Repeatable.")
    ] = [],  # noqa: B006 - typer copies it
) -> int:
    """Write nats.conf, and credentials and a context for each user.

    Credentials that are there already are kept. Users connect with their context:
    ENVBUS_CONTEXT=DIR/contexts/NAME.json.
    """
    from envbus.provision.folder import provision

    roles = {"trainers": trainers, "servers": servers, "operators": operators}
    roles |= {"controllers": controllers, "dashboards": dashboards}
    given: dict[str, Any] = {role: names.split(",") for role, names in roles.items() if names is not None}
    kind = None if passwords is None else "passwords" if passwords else "nkeys"
    others = {"accounts": accounts, "credentials": kind, "url": url, "prefix": prefix}
    given |= {key: value for key, value in others.items() if value is not None}
    if tls is not None:
        given["tls"] = {"certificates": tls}
    spec = _spec(access_file, given)
    _tell(spec, out, provision(spec, out, rotate))
    return 0


def _spec(access_file: Path | None, given: dict[str, Any]) -> AccessSpec:
    from envbus.provision.access import access_of, read_access_file

    if access_file is not None:
        return read_access_file(access_file, overrides=given)
    return access_of(**({"trainers": [], "servers": []} | given))


def _tell(spec: AccessSpec, out: Path, done: Provisioned) -> None:
    kind = "an account per trainer" if spec.accounts else "one account"
    print(f"{done.config_file}: {kind}, {len(spec.users)} users; check it with: nats-server -t -c {done.config_file}")
    if done.made:
        print(f"new {spec.credentials}: {', '.join(done.made)}")
    if done.renewed:
        print(f"new certificates, to be handed out: {', '.join(done.renewed)}")
    if done.left:
        print(f"no longer on the bus, though their files are still there: {', '.join(done.left)}")
    if done.kept:
        print("a nats-server that runs takes the changes in with: nats-server --signal reload")
    print(f"a user connects with: ENVBUS_CONTEXT={out}/contexts/NAME.json")


@nats_app.command("certs")
def certs(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to.")] = Path(
        "access/certificates"
    ),
    hosts: Annotated[
        list[str],
        typer.Option("--host", metavar="NAME", help="Name or address by which NATS is reached. Repeatable."),
    ] = [],  # noqa: B006 - typer copies it
    renew: Annotated[bool, typer.Option("--renew", help="Issue NATS's certificate anew.")] = False,
) -> int:
    """Make a certificate authority and the NATS server's certificate; users get theirs from `envbus nats conf`.

    What is there is kept, unless it ends within a month or --host names others.
    """
    from envbus.provision.certificates import make

    written = make(out, hosts=hosts, renew=renew)
    print(f"written: {', '.join(str(file) for file in written)}" if written else f"{out}: all is there and lasts")
    print(f"keep {out / 'ca.key'} away from the NATS server: who has it can be anybody")
    return 0
