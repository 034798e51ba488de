"""The process of a program under test. code_tests.py starts a fresh interpreter with the text of this file.

It runs the program, then does what the tests ask for: looks up a name, reads an attribute, calls a method. It
holds no test, no expected value and no way to the verdict, so a program gains nothing by looking around here.

Plain data goes back as it is; subclasses of it and NumPy's scalars go back as their plain base. Anything else
stays here and goes back as a number. Nothing of this repository can be imported here.
"""

import io
import operator
import pickle
import sys
import types

# a bool is an int
PLAIN = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset, range, type(None))
SPECIAL_METHODS = dict(vars(operator))  # __add__ and so on, by name
for function in (bool, delattr, iter, len, next, repr, setattr, str):
    SPECIAL_METHODS[f"__{function.__name__}__"] = function
kept_objects = []  # what the tests know by its number, the place in this list


def without_numpy(value):
    """Turns a NumPy scalar into Python's number."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


class Sender(pickle.Pickler):
    """Sends plain data, and everything else as a number."""

    def persistent_id(self, value):
        if isinstance(without_numpy(value), PLAIN) or any(value is kind for kind in PLAIN):
            return None
        kept_objects.append(value)
        return len(kept_objects) - 1

    def reducer_override(self, value):
        kind = type(value)
        value = without_numpy(value)
        for base in PLAIN:
            if isinstance(value, base) and kind is not bool:
                return NotImplemented if kind is base else (base, (base(value),))
        return NotImplemented


class Receiver(pickle.Unpickler):
    def persistent_load(self, number):
        return kept_objects[number]


def perform(namespace: dict, target, name: str, args: tuple | None, kwargs: dict | None):
    """Looks up a name of the program (no target), reads an attribute (no args) or calls a method."""
    if target is None:
        return eval(name, namespace)
    if args is None:
        return getattr(target, name)
    method = SPECIAL_METHODS.get(name) or getattr(type(target), name)
    return method(target, *args, **(kwargs or {}))


def serve(requests: int, replies: int) -> None:
    """Runs the program that comes first, then answers requests until the pipe ends.

    A reply is (value, arguments after the call), or the text of an exception.
    """
    with open(requests, "rb") as inbox, open(replies, "wb") as outbox:
        outbox.write(pickle.dumps("ready"))
        outbox.flush()
        source = pickle.load(inbox)
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        exec(compile(source, "program.py", "exec"), program.__dict__)
        while True:
            reply = io.BytesIO()
            try:
                target, name, args, kwargs = Receiver(inbox).load()
                value = perform(program.__dict__, target, name, args, kwargs)
                Sender(reply, 5).dump((value, args))
            except EOFError:
                return
            except BaseException as e:
                reply = io.BytesIO(pickle.dumps(f"{type(e).__name__}: {e}"[:300]))
            outbox.write(reply.getvalue())
            outbox.flush()
