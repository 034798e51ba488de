"""rlmt/scorers.py: each spelling of who scores."""

import pytest

from rlmt.scorers import Who, read_who


@pytest.mark.parametrize(
    "word, url, who",
    [
        ("", "", Who("nobody", "")),
        ("a/b.py:f", "http://h/v1", Who("function", "a/b.py:f")),
        ("local:a/b", "", Who("folder", "a/b")),
        ("m", "http://h/v1", Who("endpoint", "m", "http://h/v1")),
        ("judge:org/m", "", Who("endpoint", "org/m")),
        ("judge:m@1@http://h/v1", "", Who("endpoint", "m@1", "http://h/v1")),
    ],
)
def test_each_spelling_is_read(word, url, who):
    assert read_who(word, url) == who
    if word == "m":
        assert read_who(word, otherwise="folder").kind == "folder"
