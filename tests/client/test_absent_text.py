"""What is said of an env without servers; following its hint leads to no second error (P59)."""

from __future__ import annotations

import pytest

from envbus.bus.subjects import env_name
from envbus.client.absence import no_server_text
from envbus.errors import UsageError


@pytest.mark.parametrize(
    ("env", "present", "said"),
    [
        ("gsm8k", ["gsm8k~ab12cd34"], "give 'gsm8k' the same ones (-a), or that name (--name gsm8k~ab12cd34)"),
        ("gsm9k~ab12cd34", ["gsm8k~ab12cd34"], "give 'gsm8k' the same ones (-a), or that name (--name gsm8k~ab12cd34)"),
        ("gsm9k", ["gsm8k"], "did you mean 'gsm8k'?"),
        ("a", ["a~11111111", "ab"], "did you mean 'a~11111111'?"),
    ],
)
def test_a_name_with_a_digest_is_given_as_a_name(env: str, present: list[str], said: str) -> None:
    text = no_server_text(env, "nats://h:1", present)
    assert said in text
    assert ("--name" in text) == ("~" in text.partition("did you mean")[2])


def test_the_hint_and_its_refusal_as_an_env_id_name_the_same_way_out() -> None:
    with pytest.raises(UsageError, match=r"give 'gsm8k' and name= \(--name gsm8k~ab12cd34\)"):
        env_name("gsm8k~ab12cd34")
    assert env_name("gsm8k", None, "gsm8k~ab12cd34") == "gsm8k~ab12cd34"
