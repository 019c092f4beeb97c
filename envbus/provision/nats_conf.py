"""Renders the configuration of nats-server from who may do what. Pure.

All who must hear each other live in the account FLEET; with accounts each trainer has one of
its own, which imports FLEET's requests and news and shares nothing with other trainers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from envbus.bus.subjects import AllEnvs
from envbus.provision.access import AccessSpec, User
from envbus.provision.roles import news, of_role, permissions, requests

FLEET = "FLEET"
OTHERS_WINDOW_S = 600
"""How long after a request other than a new rollout it may be answered, with accounts: clients soon ask again."""
TLS_TIMEOUT_S = 5
Lines = Iterator[str]


def render(spec: AccessSpec, public_credentials: Mapping[str, str]) -> str:
    """Return the text of ``nats.conf``.

    Args:
        public_credentials: Of each user: the public nkey, or the bcrypt hash of its password.
    """
    blocks = [_listen(spec), _limits(spec)]
    if spec.tls is not None:
        blocks.append(_block("tls", _mutual_tls(spec)))
    if spec.listen.websocket_port is not None:
        blocks.append(_block("websocket", _websocket(spec)))
    blocks.append(_block("accounts", _accounts(spec, public_credentials)))
    return "\n".join(line for block in blocks for line in (*block, ""))


def account_of(spec: AccessSpec, user: User) -> str:
    """Return the name of a user's account."""
    return f"TRAINER_{user.name}" if spec.accounts and user.role == "trainer" else FLEET


def _listen(spec: AccessSpec) -> Lines:
    yield "# Written by `envbus nats conf`. Change the access file, run it again, then: nats-server --signal reload"
    yield f"listen: {_endpoint(spec.listen.host, spec.listen.port)}"
    if spec.listen.monitoring_port is not None:
        yield "# Asks nobody for credentials and tells who is connected and to what: loopback only."
        yield f"http: {_endpoint('127.0.0.1', spec.listen.monitoring_port)}"


def _limits(spec: AccessSpec) -> Lines:
    limits = spec.limits
    yield "# Each server, trainer and command has one connection; many more are a flood."
    yield f"max_connections: {limits.max_connections}"
    yield "# Of one connection. A server has about 20, a trainer 5 and one more for each env."
    yield f"max_subscriptions: {limits.max_subscriptions}"
    yield "# Of one message. Larger inputs and results travel in parts, so more is of no use."
    yield f"max_payload: {limits.max_payload_bytes}"
    yield "# What is kept for a connection that reads too slowly before it is cut. So much may come at once in good"
    yield "# order: small results of many rollouts, parts of large ones that were asked for."
    yield f"max_pending: {limits.max_pending_bytes}"
    yield "# How long one write to a connection may take before it is cut."
    yield f'write_deadline: "{limits.write_deadline_s}s"'
    yield "# Of one line of the protocol: two of the longest subjects take some 600 bytes."
    yield "max_control_line: 2048"
    yield "# A host that lost its power or network is noticed after a minute, not five: its jobs then run elsewhere."
    yield 'ping_interval: "20s"'
    yield "ping_max: 2"


def _mutual_tls(spec: AccessSpec) -> Lines:
    yield from _key_pair(spec)
    yield f"ca_file: {_quoted(_certificate_file(spec, 'ca.pem'))}"
    yield "# Whoever has no certificate of this CA cannot even try credentials."
    yield "verify: true"
    yield "# When NATS comes back all clients shake hands at once; the default of 2 s is short for that."
    yield f"timeout: {TLS_TIMEOUT_S}"
    if spec.tls is not None and spec.tls.handshake_first:
        yield "# TLS before NATS's greeting; clients must be set up for it, too (tls_first)."
        yield "handshake_first: true"


def _websocket(spec: AccessSpec) -> Lines:
    host = spec.listen.host if spec.tls is not None else "127.0.0.1"
    if spec.tls is None:
        yield "# Without certificates it speaks in clear, so on loopback: put a proxy that has TLS before it."
    yield f"listen: {_endpoint(host, spec.listen.websocket_port)}"
    if spec.tls is None:
        yield "no_tls: true"
    else:
        yield "# Browsers bring no client certificate: their users have credentials only."
        yield from _block("tls", _key_pair(spec))


def _key_pair(spec: AccessSpec) -> Lines:
    yield f"cert_file: {_quoted(_certificate_file(spec, 'server.pem'))}"
    yield f"key_file: {_quoted(_certificate_file(spec, 'server.key'))}"


def _certificate_file(spec: AccessSpec, name: str) -> str:
    assert spec.tls is not None
    folder = spec.tls.server_path or str(spec.tls.certificates.absolute())
    return f"{folder.rstrip('/')}/{name}"


def _accounts(spec: AccessSpec, credentials: Mapping[str, str]) -> Lines:
    trainers = spec.of_role("trainer") if spec.accounts else []
    yield from _block(FLEET, _fleet(spec, trainers, credentials))
    for trainer in trainers:
        yield from _block(account_of(spec, trainer), _trainer_account(spec, trainer, credentials))


def _fleet(spec: AccessSpec, trainers: list[User], credentials: Mapping[str, str]) -> Lines:
    members = [user for user in spec.users if user not in trainers]
    yield from _list("users", (_user(spec, user, credentials[user.name]) for user in members))
    if trainers:
        yield from _list("exports", _exports(spec, [account_of(spec, trainer) for trainer in trainers]))


def _exports(spec: AccessSpec, importers: list[str]) -> Iterator[list[str]]:
    importing = f"accounts: [{', '.join(importers)}]"
    yield ["# A server answers often: accepted, progress, the result, of a plain request hours later. NATS keeps 1 KB"]
    yield ["# for each request until its threshold has passed; all but new rollouts are soon asked again."]
    envs = AllEnvs(prefix=spec.prefix)
    for subject in requests(envs):
        window_s = spec.limits.reply_window_s
        window_s = window_s if subject == envs.rollout else min(window_s, OTHERS_WINDOW_S)
        answers = f'response_type: stream, response_threshold: "{window_s}s"'
        yield [f"{{ service: {_quoted(subject)}, {answers}, {importing} }}"]
    for subject in news(spec.prefix):
        yield [f"{{ stream: {_quoted(subject)}, {importing} }}"]


def _trainer_account(spec: AccessSpec, trainer: User, credentials: Mapping[str, str]) -> Lines:
    limits = spec.limits
    yield "# Of all connections of this trainer: it cannot use up what the others need."
    counts = {"max_connections": limits.trainer_connections, "max_subscriptions": limits.trainer_subscriptions}
    yield from _block("limits", (f"{name}: {count}" for name, count in counts.items()))
    yield from _list("users", [_user(spec, trainer, credentials[trainer.name])])
    yield from _list("imports", _imports(spec, trainer))


def _imports(spec: AccessSpec, trainer: User) -> Iterator[list[str]]:
    used = of_role(trainer, spec.prefix)
    for kind, subjects in (("service", used.publish), ("stream", used.subscribe)):
        for subject in subjects:
            yield [f"{{ {kind}: {{ account: {FLEET}, subject: {_quoted(subject)} }} }}"]


def _user(spec: AccessSpec, user: User, credential: str) -> Lines:
    allowed = permissions(user, spec)
    connections = '"STANDARD", "WEBSOCKET"' if user.may_use_websocket else '"STANDARD"'
    yield "{"
    yield f"  # {user.role} {user.name}"
    if spec.credentials == "nkeys":
        yield f"  nkey: {credential}"
    else:
        yield f"  user: {_quoted(user.name)}, password: {_quoted(credential)}"
    yield f"  allowed_connection_types: [{connections}]"
    yield "  permissions {"
    yield from _subjects("publish", allowed.publish)
    yield from _subjects("subscribe", allowed.subscribe)
    yield "  }"
    yield "}"


def _subjects(action: str, subjects: Iterable[str]) -> Lines:
    yield f"    {action} {{ allow: ["
    yield from (f"      {_quoted(subject)}" for subject in subjects)
    yield "    ] }"


def _block(name: str, lines: Iterable[str]) -> Lines:
    yield f"{name} {{"
    yield from (f"  {line}" for line in lines)
    yield "}"


def _list(name: str, items: Iterable[Iterable[str]]) -> Lines:
    yield f"{name}: ["
    yield from (f"  {line}" for item in items for line in item)
    yield "]"


def _endpoint(host: str, port: int | None) -> str:
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return _quoted(f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
