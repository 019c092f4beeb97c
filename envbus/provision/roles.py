"""What each role may publish and subscribe to: no more than the product does. Pure.

Who answers may publish to the inboxes of those who ask. NATS's own ``allow_responses`` is of no use: it lets a user
publish wherever a message that it gets says to reply to, its own messages included, so anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from envbus.bus.subjects import (
    WORK_QUEUE,
    AllEnvs,
    Subjects,
    all_beats,
    all_controller_beats,
    all_discovery,
    all_gone,
    controller,
    controller_beat,
)
from envbus.provision.access import AccessSpec, Role, User

MAPPED_REPLIES = "_R_.>"
"""What NATS makes of the reply subjects of requests that come from another account: random ones."""
_ASKED_BY: Mapping[Role, tuple[Role, ...]] = {
    "server": ("trainer", "operator", "controller"),
    "controller": ("operator",),
}


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user may do.

    Attributes:
        subscribe: Subjects; those with a queue group behind them in that group only.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions(user: User, spec: AccessSpec) -> Permissions:
    """Return what a user may do."""
    role = of_role(user, spec.prefix)
    inbox = _inbox(user)  # to publish, too: a connection probes itself
    return Permissions((*role.publish, inbox, *_answers(user, spec)), (*role.subscribe, inbox))


def _answers(user: User, spec: AccessSpec) -> Iterator[str]:
    """Where a user answers those who may ask it: names of inboxes are secrets between the two."""
    for asking in spec.of_role(*_ASKED_BY.get(user.role, ())):
        if not (spec.accounts and asking.role == "trainer"):
            yield _inbox(asking)
    if spec.accounts and user.role == "server":
        yield MAPPED_REPLIES


def _inbox(user: User) -> str:
    return f"{user.inbox_prefix}.>"


def of_role(user: User, prefix: str) -> Permissions:
    """Return the same without the user's own inbox."""
    return _ROLES[user.role](user, prefix)


def _envs(user: User, prefix: str) -> Sequence[Subjects]:
    names = user.details.envs
    return [AllEnvs(prefix=prefix)] if names is None else [Subjects(name, prefix) for name in names]


def _server(user: User, prefix: str) -> Permissions:
    envs = _envs(user, prefix)
    work = [subject for env in envs for subject in (env.rollout, env.info, env.examples)]
    told = [subject for env in envs for subject in (env.wait, env.server("*"), env.ctl("*"))]
    return Permissions(
        publish=tuple(env.beat("*") for env in envs),
        subscribe=(*(f"{subject} {WORK_QUEUE}" for subject in work), *told, all_discovery()),
    )


def _trainer(user: User, prefix: str) -> Permissions:
    envs = _envs(user, prefix)
    beats = (all_beats(prefix), all_controller_beats(prefix)) if user.details.beats else ()
    return Permissions(
        publish=tuple(subject for env in envs for subject in requests(env)),
        subscribe=(*(env.gone for env in envs), *beats),
    )


def requests(env: Subjects) -> tuple[str, ...]:
    """What clients send."""
    return (env.rollout, env.info, env.examples, env.wait, env.server("*"))


def news(prefix: str) -> tuple[str, ...]:
    """What clients hear without having asked."""
    return (all_gone(prefix), all_beats(prefix), all_controller_beats(prefix))


def _operator(user: User, prefix: str) -> Permissions:
    envs = AllEnvs(prefix=prefix)
    calls = requests(envs) if user.details.calls else (envs.info,)
    return Permissions(
        publish=(envs.ctl("*"), controller("*", prefix), *calls, all_discovery()),
        subscribe=news(prefix),
    )


def _controller(user: User, prefix: str) -> Permissions:
    envs, own_id = AllEnvs(prefix=prefix), user.details.controller_id or user.name
    own = controller(own_id, prefix)
    return Permissions(
        publish=(own, controller_beat(own_id, prefix), envs.gone, envs.ctl("*")),  # asks if its name is taken
        subscribe=(own, all_beats(prefix), all_controller_beats(prefix)),
    )


def _dashboard(user: User, prefix: str) -> Permissions:
    return Permissions(publish=(), subscribe=news(prefix))


_ROLES: dict[Role, Callable[[User, str], Permissions]] = {
    "server": _server,
    "trainer": _trainer,
    "operator": _operator,
    "controller": _controller,
    "dashboard": _dashboard,
}
