"""Tests which server gets which API key, and that none is accepted where it would be logged."""

import pytest

from rlmt import endpoint as api_keys

KEY = "other-0123456789abcdef"


@pytest.mark.parametrize(
    "url, key_env, variable",
    [
        ("https://api.openai.com/v1", (), "OPENAI_API_KEY"),
        ("https://API.OpenAI.com/v1", (), "OPENAI_API_KEY"),
        ("http://api.openai.com/v1", (), ""),  # it would be readable on its way
        ("https://api.openai.com.example.org/v1", (), ""),
        ("https://example.org/api.openai.com", (), ""),
        ("https://api.openai.com:8443/v1", (), ""),
        ("https://example.org/v1", ("example.org=A",), "A"),
        ("https://example.org:81/v1", ("example.org=A", "Example.org:81=B"), "B"),
        ("https://example.org:82/v1", ("example.org=A", "example.org:81=B"), "A"),
        ("https://sub.example.org/v1", ("example.org=A",), ""),
        ("https://api.openai.com/v1", ("example.org=A", "api.openai.com=B"), "B"),
        ("http://[::1]:8000/v1", ("[::1]:8000=A",), "A"),
    ],
)
def test_which_variable_holds_the_key_of_a_url(url, key_env, variable, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for name in ("OPENAI_API_KEY", "A", "B"):
        monkeypatch.setenv(name, f"key in {name}")
    assert api_keys.variable_for(url, key_env) == variable
    assert api_keys.key_for(url, key_env) == (f"key in {variable}" if variable else "")


@pytest.mark.parametrize(
    "word",
    [KEY, f"host={KEY}", f"{KEY}=host.org", "https://host/v1=HOME", "host=", "=HOME"],
)
def test_a_key_in_the_place_of_its_name_is_refused_and_not_repeated(word):
    with pytest.raises(ValueError, match="--key-env, word 2: write HOST=NAME") as error:
        api_keys.check_key_env(("a.org=HOME", word))
    assert KEY not in str(error.value)


def test_a_url_without_a_key_is_accepted():
    for url in ("", "http://localhost:8000/v1", "https://host/models/name@version/v1"):
        api_keys.check_url(url, "--judge-url")
