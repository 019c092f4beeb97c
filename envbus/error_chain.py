"""Errors as text that crosses processes: the cause chain, and ErrorInfo made from a live exception.

Everything here is bounded and never raises, whatever the exception's own str and repr do.
"""

from __future__ import annotations

import traceback

from envbus.types import ErrorInfo

MAX_CHAIN = 16
MAX_REPR_CHARS = 2_048
MAX_TRACEBACK_CHARS = 4_096
TRACEBACK_FRAMES = 16


class ErrorChain:
    """An exception and its causes (``__cause__``), outermost first.

    ``str`` joins the type names, ``repr`` the reprs; ``SomeError in chain`` tests every link by class.
    Two chains are equal when their type names are.
    """

    def __init__(self, error: BaseException) -> None:
        self.root_error = error
        self.chain = _links(error)

    def __contains__(self, error_class: type[BaseException]) -> bool:
        return any(isinstance(error, error_class) for error in self.chain)

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, ErrorChain) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return " -> ".join(_name(type(error)) for error in self.chain)

    def __repr__(self) -> str:
        return " -> ".join(_repr(error) for error in self.chain)


def error_info(error: BaseException) -> ErrorInfo:
    """Describe an exception for an output or the wire: chain, base classes, traceback, all bounded.

    ``retryable`` is true when any error of the chain says so, so that a wrapped hiccup stays one.
    """
    chain = ErrorChain(error)
    return ErrorInfo(
        error=_name(type(error)),
        error_chain_repr=repr(chain),
        error_chain_str=str(chain),
        error_bases=[_name(base) for base in type(error).__mro__ if base is not object][:MAX_CHAIN],
        retryable=any(getattr(link, "retryable", False) is True for link in chain.chain),
        traceback=_traceback(chain.chain),
    )


def error_matches(info: ErrorInfo, *error_classes: type[BaseException]) -> bool:
    """Whether the outermost error is of one of the classes, as ``isinstance`` would say where it was raised.

    Classes are compared by name, since the class itself may not exist in this process.
    """
    bases = info.get("error_bases") or [info["error"]]
    return any(error_class.__name__ in bases for error_class in error_classes)


def _links(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(links) < MAX_CHAIN and not any(link is seen for seen in links):
        links.append(link)
        link = link.__cause__
    return links


def _traceback(chain: list[BaseException]) -> str:
    parts = ["".join(traceback.format_tb(link.__traceback__, -TRACEBACK_FRAMES)) + _repr(link) for link in chain]
    text = "\n\n".join(reversed(parts))
    return text if len(text) <= MAX_TRACEBACK_CHARS else "…" + text[-MAX_TRACEBACK_CHARS + 1 :]


def _name(cls: type) -> str:
    return _bounded(cls.__name__, 256)


def _repr(error: BaseException) -> str:
    try:
        text = repr(error)
    except Exception as failure:  # noqa: BLE001 - foreign __repr__ and __str__ may raise anything
        text = f"{type(error).__name__}(<its repr raised {type(failure).__name__}>)"
    return _bounded(text, MAX_REPR_CHARS)


def _bounded(text: str, limit: int) -> str:
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return short.encode("utf-8", "backslashreplace").decode()
