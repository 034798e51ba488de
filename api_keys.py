"""Decides which server gets which API key, and keeps keys out of files, logs and messages.

`key_env` is the value of --key-env: words HOST=NAME or HOST:PORT=NAME. NAME is the environment variable that holds
the key for that server. OPENAI_API_KEY belongs to the OpenAI API and to the server of OPENAI_BASE_URL alone.
"""

import os
import re
from urllib.parse import urlsplit

OPENAI_URL = "https://api.openai.com/v1"
WORD = re.compile(r"[^\s=/@]+=[A-Za-z_][A-Za-z0-9_]*")  # HOST=NAME or HOST:PORT=NAME
URL_WITH_KEY = re.compile(r"^[^/]*@|://[^/]*@|\?")  # a user and password, or a query
SHORTEST_KEY = 8  # characters; a shorter one is a placeholder for `vllm serve`, such as EMPTY


# --- 1. whose key


def key_for(url: str, key_env: tuple[str, ...] = ()) -> str:
    """Returns the API key that belongs to the server of `url`; "" if there is none."""
    return read_variable(variable_for(url, key_env))


def variable_for(url: str, key_env: tuple[str, ...] = ()) -> str:
    """Returns the environment variable that holds the key for the server of `url`; "" if none does."""
    variables = {}
    for word in key_env:
        place, _, variable = word.rpartition("=")
        variables[place.lower()] = variable
    server = server_of(url)
    host = re.sub(r":\d+$", "", server)
    for place in (server, host):
        if place in variables:
            return variables[place]

    for known_url in (OPENAI_URL, os.environ.get("OPENAI_BASE_URL", "")):
        # a key for https must not travel over http, where others can read it
        same_scheme = urlsplit(url).scheme == urlsplit(known_url).scheme
        if same_scheme and server == server_of(known_url):
            return "OPENAI_API_KEY"
    return ""


def server_of(url: str) -> str:
    """Returns host:port of a URL, or the host alone if it names no port."""
    return urlsplit(url).netloc.lower()


def read_variable(name: str) -> str:
    """Returns what an environment variable holds, without the line end that an editor leaves."""
    return os.environ.get(name, "").strip()


# --- 2. checks before a run


def check_url(url: str, flag: str) -> None:
    """Raises ValueError if a URL holds a user, a password or a key. The message does not repeat it."""
    if URL_WITH_KEY.search(url):
        raise ValueError(
            f"{flag}: do not write a user, password or key into a URL: it is logged; set OPENAI_API_KEY, or name the "
            "variable that holds the key by --key-env HOST=NAME"
        )


def check_key_env(key_env: tuple[str, ...]) -> None:
    """Raises ValueError if a word of --key-env does not name a variable that holds a key.

    The messages do not repeat the word: it may hold a key by mistake.
    """
    for number, word in enumerate(key_env, 1):
        if not WORD.fullmatch(word):
            raise ValueError(
                f"--key-env, word {number}: write HOST=NAME or HOST:PORT=NAME, without http:// and path; NAME is the "
                "environment variable that holds the key, never the key itself, as commands are logged"
            )
        if not read_variable(word.rpartition("=")[2]):
            raise ValueError(
                f"--key-env, word {number}: the environment variable that it names is not set; set it to the key, "
                "and do not write the key itself here, as commands are logged"
            )


def check_key(url: str, key_env: tuple[str, ...], model: str) -> None:
    """Raises ValueError if the OpenAI API, asked for `model`, has no key, or if a key cannot be one."""
    key = key_for(url, key_env)
    if not key and url == OPENAI_URL:
        raise ValueError(
            f"{url} needs a key, to ask {model}: set OPENAI_API_KEY, name the variable that holds the key by "
            f"--key-env {server_of(url)}=NAME, or name another endpoint by its URL"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{url}: set {variable_for(url, key_env)} to the key and nothing else")


# --- 3. messages


def advice(url: str, key_env: tuple[str, ...]) -> str:
    """Says what to do if the server of `url` does not accept the key, or wants one and got none."""
    variable = variable_for(url, key_env)
    sent = f"it was sent the key in {variable}" if variable else "it was sent no key"
    return f"{sent}; --key-env {server_of(url)}=NAME names the environment variable that holds its key"


def hide_keys(text: str, key_env: tuple[str, ...] = ()) -> str:
    """Replaces by *** the key in OPENAI_API_KEY, and those in the variables that `key_env` names."""
    variables = ["OPENAI_API_KEY"]
    variables += [word.rpartition("=")[2] for word in key_env]
    for variable in variables:
        key = read_variable(variable)
        if len(key) >= SHORTEST_KEY:  # a placeholder may occur in any text
            text = text.replace(key, "***")
    return text
