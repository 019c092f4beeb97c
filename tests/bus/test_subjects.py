"""Names on the bus: reversible, distinct, short enough (CASES P35, P56)."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from envbus.bus.subjects import (
    MAX_TOKEN_BYTES,
    AllEnvs,
    Subjects,
    all_beats,
    args_digest,
    check_prefix,
    decode_token,
    encode_token,
    env_name,
    parse_beat,
    parse_gone,
)
from envbus.errors import UsageError

SURROGATES = st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF, categories=["Cs"])
NASTY = st.text(st.one_of(st.sampled_from("./ *>%-_~@+\\\t\n\x00é日😀"), SURROGATES, st.characters()), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def shuffled(value: object) -> object:
    """The same value with every map's keys the other way round."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(NASTY.filter(bool))
def test_a_token_is_reversible_and_one_nats_token(name: str) -> None:
    """CASES P56."""
    token = encode_token(name)
    assert decode_token(token) == name
    assert token.isascii()
    assert not set(token) & set(".*> \t\r\n\x00")


@given(NASTY.filter(bool), NASTY.filter(bool))
def test_names_that_differ_have_subjects_that_differ(first: str, second: str) -> None:
    assume(first != second)
    assert encode_token(first) != encode_token(second)


def test_names_that_look_alike_stay_apart() -> None:
    """CASES P56: separators, case, versions, and what naive escaping would join."""
    names = ["owner/my-env", "owner--my-env", "owner__my-env", "owner.my-env", "owner/my-env@1.2.0", "owner/my_env"]
    names += ["a/b", "a--b", "a%2Fb", "math.v1.2", "my env", "my%20env", "MATH", "math", "é", "e\u0301", "*", ">"]
    assert len({encode_token(name) for name in names}) == len(names)
    assert [decode_token(encode_token(name)) for name in names] == names


@pytest.mark.parametrize(
    ("name", "token"),
    [("reverse-text", "reverse-text"), ("owner/my-env@1.2.0", "owner%2Fmy-env@1%2E2%2E0"), ("MATH~0a1b", "MATH~0a1b")],
)
def test_tokens_stay_readable_and_stay_the_same(name: str, token: str) -> None:
    """They are part of the protocol."""
    assert encode_token(name) == token


def test_a_token_has_1_to_128_bytes() -> None:
    assert len(encode_token("a" * MAX_TOKEN_BYTES)) == MAX_TOKEN_BYTES
    for name in ("", "a" * (MAX_TOKEN_BYTES + 1), "é" * 22):
        with pytest.raises(UsageError, match="1 to 128"):
            encode_token(name)


# ---- names


def test_without_arguments_the_name_is_the_env_id() -> None:
    assert env_name("owner/my-env") == env_name("owner/my-env", {}) == "owner/my-env"


def test_arguments_are_part_of_the_name() -> None:
    """CASES P35: differently configured servers never share a queue."""
    easy, hard = env_name("math", {"level": 1}), env_name("math", {"level": 5})
    assert len({easy, hard, env_name("math", {"level": "1"}), env_name("math")}) == 4
    assert easy.startswith("math~")
    assert len(easy) == len("math~") + 8


def test_the_digest_of_arguments_is_part_of_the_protocol() -> None:
    assert args_digest({"level": 1, "name": "é"}) == "15c10d37"


@given(st.dictionaries(st.text(max_size=5), JSON, min_size=1, max_size=4))
def test_the_order_of_keys_does_not_matter(args: dict[str, object]) -> None:
    assert env_name("e", args) == env_name("e", shuffled(args))  # type: ignore[arg-type]


def test_a_given_name_overrides_all() -> None:
    assert env_name("math", {"level": object()}, name="my name~1") == "my name~1"


@pytest.mark.parametrize(
    ("env_id", "args", "name"),
    [
        ("", None, None),
        ("math", None, ""),
        ("math~1", None, None),
        ("math", {"f": object()}, None),
        ("math", {"x": float("nan")}, None),
        ("math", {1: 2, "a": 3}, None),
    ],
)
def test_bad_names_are_usage_errors(env_id: str, args: dict[str, object] | None, name: str | None) -> None:
    with pytest.raises(UsageError):
        env_name(env_id, args, name)


# ---- subjects


def test_the_subjects_of_an_env() -> None:
    subjects = Subjects("owner/e")
    base = "env.owner%2Fe."
    assert [subjects.rollout, subjects.info, subjects.examples, subjects.wait] == [
        base + tail for tail in ("rollout", "info", "examples", "wait")
    ]
    assert [subjects.server("s"), subjects.ctl("s"), subjects.ctl_all] == [
        base + tail for tail in ("server.s", "ctl.s", "ctl.all")
    ]
    assert [subjects.beat("s"), subjects.beats, all_beats()] == [base + "beat.s", base + "beat.*", "env.*.beat.*"]


@given(NASTY.filter(bool), st.sampled_from(["env", "team-a.env_2"]))
def test_a_beat_tells_whose_it_is(name: str, prefix: str) -> None:
    assert parse_beat(Subjects(name, prefix).beat("s1"), prefix) == (name, "s1")


@pytest.mark.parametrize(
    "subject", ["env.a.beat", "env.a.beat.s.x", "env.a.wait", "other.a.beat.s", "envx.a.beat.s", ""]
)
def test_other_subjects_are_no_beats(subject: str) -> None:
    assert parse_beat(subject) is None


@pytest.mark.parametrize("prefix", ["", ".", "a.", ".a", "a..b", "a b", "a.*", ">", "é", "a/b", "$SYS"])
def test_a_prefix_is_plain(prefix: str) -> None:
    for use in (check_prefix, all_beats, lambda value: Subjects("e", value)):
        with pytest.raises(UsageError, match="prefix"):
            use(prefix)
    assert check_prefix("team-a.env_2") == "team-a.env_2"


def test_an_env_that_has_no_subject_is_refused_at_once() -> None:
    with pytest.raises(UsageError):
        Subjects("a" * 200)


@pytest.mark.parametrize("subject", ["env.%FF.beat.x", "env.%ff%fe.gone", "env.%C3.beat.x"])
def test_tokens_of_strangers_that_encode_no_name(subject: str) -> None:
    assert parse_beat(subject) is None
    assert parse_gone(subject) is None


def test_all_envs_are_matched_by_patterns_of_the_same_shape() -> None:
    """Token by token: what one env has, ``*`` in the env's place matches."""
    one, every = Subjects("owner/my.env", "rl"), AllEnvs(prefix="rl")
    pairs = [
        (getattr(one, name), getattr(every, name))
        for name in ("rollout", "info", "examples", "wait", "ctl_all", "gone", "beats")
    ]
    pairs += [(getattr(one, name)("5e"), getattr(every, name)("*")) for name in ("server", "ctl", "beat")]
    for subject, pattern in pairs:
        assert pattern.split(".")[1] == "*"
        matched = [mine in (its, "*") for its, mine in zip(subject.split("."), pattern.split("."), strict=True)]
        assert all(matched), (subject, pattern)
