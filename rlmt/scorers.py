"""Reads who scores: a function in a file, a model in a folder of this machine, or a model at an endpoint.

file.py:function         a function                                  every flag
FOLDER, hub name         a model that this machine loads             --reward-model, --gold
local:FOLDER             a judge that this machine serves            --judge
MODEL, with --judge-url  a model at an endpoint                      --judge, --simulator, --model
judge:MODEL[@URL]        the same                                    --gold
"""

import copy
import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from utils import fail


class Who(NamedTuple):
    """Who scores."""

    kind: Literal["nobody", "function", "folder", "endpoint"]
    name: str
    """The function as file.py:name, the folder, or the model's name."""
    url: str = ""
    """Of the endpoint; empty: that of OPENAI_BASE_URL, else the official one."""


def read_who(word: str, url: str = "", otherwise: Literal["folder", "endpoint"] = "endpoint") -> Who:
    """Reads the word of a flag; `otherwise` is the kind of a word that shows none."""
    if not word:
        return Who("nobody", "")
    if ".py:" in word:
        return Who("function", word)
    if word.startswith("local:"):
        return Who("folder", word.removeprefix("local:"))
    if word.startswith("judge:"):
        name, at, rest = word.removeprefix("judge:").partition("@http")  # a name may have an @ too
        return Who("endpoint", name, at.removeprefix("@") + rest)
    return Who(otherwise, word, url)


def connect(who: Who, store: Path, args=None, n_shares: int = 1, **settings):
    """Returns the client of an endpoint, an Endpoint; exits with 2 if it cannot be asked, as without a key.

    Args:
        store: the file that keeps its replies.
        args: flags with `price`, `key_env`, `omit` and a `budget`, of which this process has one of `n_shares`;
            None where nothing is paid for.
        settings: of Endpoint, in the place of those flags or in addition to them.
    """
    from rlmt.endpoint import Endpoint  # slow to import, and most runs ask nobody

    if args:
        budget = args.budget / n_shares
        flags = {"budget": budget, "price": args.price, "key_env": args.key_env, "omit": args.omit}
        settings = flags | settings
    return Endpoint(who.name, store, who.url, **settings)


@functools.cache
def load_function(spec: str):
    """Loads the function of `path/to/file.py:name`; exits with 2 if there is none.

    It gets copies: what it changes, such as the turns of a row, nobody else reads. Its file, which may load a model,
    is run once, however often its functions are asked for. It may import files that lie next to it.
    """
    path, _, name = spec.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        fail(f"{spec!r} is not file.py:function of an existing file")
    file = Path(path).resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that it hides no other module
    # by this name another process finds it; if it is taken, at least those that are forked do
    module_name = file.stem
    found = importlib.util.find_spec(module_name) if module_name.isidentifier() else None
    if found is None or found.origin != str(file):
        module_name = re.sub(r"\W", "_", str(file))
    if module_name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(module_name, file)
        sys.modules[module_name] = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(sys.modules[module_name])
    function = getattr(sys.modules[module_name], name, None)
    if function is None:
        fail(f"{path} has no function {name!r}")

    @functools.wraps(function)
    def on_copies(*values, **context):
        return function(*copy.deepcopy(values), **context)

    return on_copies
