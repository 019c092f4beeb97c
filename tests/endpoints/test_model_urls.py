"""What is no http or https URL is refused when it is named, not when the first rollout fails (P46)."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from envbus.cli.providers import choose_endpoint
from envbus.errors import UsageError
from envbus.types import ClientConfig, EndpointConfig

SENTENCE = "must be an http or https URL like http://localhost:8000/v1"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "", "http://", "/v1", "http://[x", "http://x:port/"])
def test_a_url_that_is_none_is_refused_with_the_sentence_of_the_command_line(url: str) -> None:
    with pytest.raises(ValidationError, match=SENTENCE):
        ClientConfig(api_base_url=url)
    with pytest.raises(ValidationError, match=SENTENCE):
        EndpointConfig(api_base_url=url)
    with pytest.raises(UsageError, match=SENTENCE):
        choose_endpoint(None, url, None, extra_headers={}, keys_here=False)


@pytest.mark.parametrize("url", ["http://localhost:8000", "https://[::1]/v1", "HTTP://x", "http://user:word@x/v1"])
def test_other_urls_are_taken(url: str) -> None:
    assert ClientConfig(api_base_url=url).api_base_url == url
