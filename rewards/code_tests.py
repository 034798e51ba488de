"""The process that runs the tests of a program. code_runner.py sends this text and a call of `main` there.

It prints `ready`, then for each test 1 (passed), 0 (failed) or ? (cannot be run in this way).

The program runs in a second process (code_program.py), a fresh interpreter without the tests and without this
one's open files. It answers over pipes with plain data. Data is compared here, so neither frames nor an
overridden __eq__ help the program. Its objects appear here as `Remote`: they can be called, indexed,
iterated, set, entered and combined, and equal only themselves. Nothing of this repository can be imported
here.
"""

import ast
import builtins
import ctypes
import os
import pickle
import subprocess
import sys

PLAIN = {"int", "float", "complex", "str", "bytes", "tuple", "list", "dict", "set", "frozenset", "range"}
FORWARDED = "call getitem setitem delitem setattr delattr len bool iter next str repr enter".split()
OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift neg pos abs invert".split()
SCALING = ("__add__", "__mul__", "__truediv__")  # of an object and a number, as for vectors


class Untestable(Exception):
    """A test hands the program something that cannot be sent, as a function."""


class Remote:
    """An object of the program."""

    def __init__(self, connection, number: int):
        self.__dict__["_connection"] = connection
        self.__dict__["_number"] = number

    def __getattr__(self, name):
        return self._connection.ask(self, name)

    def __exit__(self, kind, error, traceback):
        # The program hears the kind of an error, not its words, which may tell what is expected. It cannot
        # swallow an error.
        if kind is not None and kind.__module__ != "builtins":
            kind = RuntimeError
        self._connection.ask(self, "__exit__", (kind, kind and kind(), None))

    def __setstate__(self, state):  # else a pickle could change the number
        raise pickle.UnpicklingError("an object of the program's has no state here")


def forwarded(name: str):
    """Makes a method that the program's object answers."""

    def method(self, *args, **kwargs):
        return self._connection.ask(self, name, args, kwargs)

    return method


def combine(connection, left, name: str, *right):
    """Asks for the result of an operator, which must be an object of the program's.

    Plain data as the result could be close to any expected value, as in abs(f(2) - 5) < 1e-6. Nor does the
    program see the plain data that its object is compared with by - or ^.
    """
    if name not in SCALING and any(type(side) is not Remote for side in (left, *right)):
        return NotImplemented
    value = connection.ask(left, name, right)
    if type(value) is not Remote:
        raise TypeError(f"{name} of objects gave plain data")
    return value


def operator_method(name: str):
    def method(self, *right):
        return combine(self._connection, self, name, *right)

    return method


def reflected_method(name: str):
    def method(self, left):
        return combine(self._connection, left, name, self)

    return method


for word in FORWARDED:
    setattr(Remote, f"__{word}__", forwarded(f"__{word}__"))
for word in OPERATORS:
    setattr(Remote, f"__{word}__", operator_method(f"__{word}__"))
    setattr(Remote, f"__r{word}__", reflected_method(f"__{word}__"))


class Sender(pickle.Pickler):
    def persistent_id(self, value):
        # A forged reply can be a memoryview. If handing it back made the test unrunnable, that would be a way
        # out of a 0.
        if type(value) is memoryview:
            raise ValueError("not plain data")
        return value._number if type(value) is Remote else None


class Receiver(pickle.Unpickler):
    """Reads plain data and numbers of objects; refuses everything else that a pickle can hold."""

    def __init__(self, connection):
        super().__init__(connection.inbox)
        self.connection = connection

    def find_class(self, module, name):  # C types only, which no pickle can change
        if module == "builtins" and name in PLAIN:
            return getattr(builtins, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")

    def persistent_load(self, number):
        # If a number that cannot be sent back made the test unrunnable, that would be a way out of a 0.
        if type(number) is not int:
            raise pickle.UnpicklingError(f"{number!r} is not the number of an object")
        return Remote(self.connection, number)


class Connection:
    """The pipes to the program's process."""

    def __init__(self, inbox, outbox):
        self.inbox = inbox
        self.outbox = outbox

    def receive(self):
        return Receiver(self).load()

    def ask(self, target, name: str, args: tuple | None = None, kwargs: dict | None = None):
        """Returns what the program answers, or raises its exception.

        Arguments change as the program changed them.
        """
        try:
            Sender(self.outbox, 5).dump((target, name, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as e:  # a function of the test's, a lock ...
            raise Untestable from e
        self.outbox.flush()
        reply = self.receive()
        if isinstance(reply, str):
            kind = getattr(builtins, reply.partition(":")[0], None)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known else RuntimeError)(reply)
        value, changed_args = reply
        for old, new in zip(args or (), changed_args or ()):
            if type(old) is type(new) is list:
                old[:] = new
            elif type(old) is type(new) and type(old) in (dict, set):
                old.clear()
                old.update(new)
        return value


def names_used_in(tests: list[str]) -> set[str]:
    """Finds the names that the tests read or set. SyntaxError or ValueError where a test is not Python."""
    names = set()
    for test in tests:
        names |= {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    return names


def start_program(program_process: str) -> Connection:
    """Starts the second process with the source `program_process`.

    It inherits two pipe ends and no other open file.
    """
    library = next(path for path in sys.path if os.path.exists(f"{path}/os.py"))
    home = library.rpartition("/lib/")[0]  # maybe the sandbox's door to a closed folder: see sandbox._inside
    doors = {int(path.split("/")[4]) for path in sys.path if path.startswith("/proc/self/fd/")}
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    interpreter = home + sys._base_executable.removeprefix(sys.base_prefix)
    source = f"import sys\nsys.path[:] = {sys.path}\n{program_process}\nserve({their_in}, {their_out})"
    subprocess.Popen(
        [interpreter, "-sSP", "-X", "utf8", "-c", source],
        env=os.environ | {"PYTHONHOME": home, "LD_LIBRARY_PATH": f"{home}/lib"},
        pass_fds=(their_in, their_out, *doors),
        stdout=sys.stderr,
    )
    os.close(their_in)
    os.close(their_out)
    return Connection(open(our_in, "rb"), open(our_out, "wb"))


def namespace_of(names: set[str], entry_point: str, connection: Connection) -> dict:
    """Looks up the names that the tests use.

    Modules of the standard library are imported, as the program must not replace them.
    """
    found = {"__name__": "tests"}
    for name in names - (set(dir(builtins)) - {entry_point}):
        from_library = name in sys.stdlib_module_names and name != entry_point
        try:
            found[name] = __import__(name) if from_library else connection.ask(None, name)
        except Exception:  # the program has no such name
            continue
    return found


def main(program_process: str, program: str, tests: list[str], entry_point: str) -> None:
    """Prints the verdicts on `program`. `program_process` is the text of code_program.py."""
    # Keeps the program, which has the same user id, out of this process's memory and files.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    try:
        names = names_used_in(tests)
    except (SyntaxError, ValueError):
        print("ready ?")
        return

    verdicts = open(os.dup(1), "w")
    os.dup2(2, 1)  # what a test prints may be the program's words
    connection = start_program(program_process)
    with connection.inbox, connection.outbox:
        print(connection.receive(), file=verdicts, flush=True)
        pickle.dump(program, connection.outbox)
        namespace = namespace_of(names, entry_point, connection)
        for test in tests:
            try:
                exec(compile(test, "tests", "exec"), namespace)
                verdict = "1"
            except Untestable:
                verdict = "?"
            except Exception:
                verdict = "0"
            print(verdict, file=verdicts, flush=True)
