"""Code that runs inside the sandbox: the grader sends the source text of this file.

`answer` runs the program, then makes the calls asked for, and prints what they returned. `judge`
runs the code of a test, in a sandbox that the program never enters: a call to the program gets its
result from what `answer` printed before, and calls whose result is not known yet are asked for.
Both print one JSON list to stdout.

A program can reach everything in `answer`. That is harmless: the expected results are not in there,
so whatever the program makes `answer` print is only its answer.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from typing import Any

MAX_DEPTH = 100
MAX_ITEMS = 200_000
"""Most items that are read from an iterator which a program returned."""
MAX_BITS = 400_000
"""Most bits of an integer that is put into plain form, about 120,000 decimal digits."""
SMALL = 10**15

Tree = Any
"""A value in its plain form, as JSON: null, true, false, a string, a small integer, or a list that
begins with a tag: i integer, f float, c complex, b bytes, l list, t tuple, s set, z frozenset, d
dict, q fraction, m decimal; h (only in calls) an object that stays with the program."""


class Refused(Exception):
    """A value cannot be put into plain form."""


def encode(value: Any, depth: int = 0) -> Tree:
    """The plain form of a value that lies in `depth` containers. Only methods of builtin types are
    called; an instance of a subclass is treated as one of the builtin type. Raises `Refused`."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if depth > MAX_DEPTH:
        raise Refused("nested too deeply")
    if issubclass(kind, int):
        return encode_int(int.__pos__(value))
    if issubclass(kind, float):
        return ["f", float.hex(value)]
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, list):
        return ["l", *(encode(item, depth + 1) for item in list.__iter__(value))]
    if issubclass(kind, tuple):
        return ["t", *(encode(item, depth + 1) for item in tuple.__iter__(value))]
    if issubclass(kind, dict):
        pairs = [part for pair in dict.items(value) for part in pair]
        return ["d", *(encode(part, depth + 1) for part in pairs)]
    return encode_rare(value, kind, depth)


def encode_int(number: int) -> Tree:
    if -SMALL < number < SMALL:
        return number
    if number.bit_length() > MAX_BITS:
        raise Refused("too many digits")
    return ["i", f"{number:x}"]


def encode_rare(value: Any, kind: type, depth: int) -> Tree:
    for base, tag in ((set, "s"), (frozenset, "z")):
        if issubclass(kind, base):
            return [tag, *(encode(item, depth + 1) for item in base.__iter__(value))]
    if issubclass(kind, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if issubclass(kind, complex):
        plain = complex.__pos__(value)
        return ["c", plain.real.hex(), plain.imag.hex()]
    origin = f"{kind.__module__}.{kind.__name__}"
    if origin == "fractions.Fraction":
        return ["q", f"{value.numerator:x}", f"{value.denominator:x}"]
    if origin == "decimal.Decimal":
        return ["m", str(value)]
    if origin.startswith("numpy."):
        return encode(value.tolist(), depth + 1)
    listed = ("builtins.range", "builtins.dict_", "builtins.odict_", "collections.deque", "array.")
    if hasattr(kind, "__next__") or origin.startswith(listed):
        return ["l", *(encode(item, depth + 1) for item in limited(value))]
    raise Refused(f"a {kind.__name__} has no plain form")


def limited(items: Any) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if len(found) == MAX_ITEMS:
            raise Refused("too many items")
        found.append(item)
    return found


def decode(tree: Tree, objects: Any = ()) -> Any:
    """The value whose plain form is `tree`; the inverse of `encode`. A tag "h" in it stands for the
    program's object that `objects` has under the number there."""
    if type(tree) is not list:
        return tree
    tag, rest = tree[0], tree[1:]
    if tag in "ltszd":
        items = [decode(item, objects) for item in rest]
        if tag == "d":
            return dict(zip(items[::2], items[1::2], strict=True))
        return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](items)
    if tag == "i":
        return int(rest[0], 16)
    if tag == "f":
        return float.fromhex(rest[0])
    if tag == "c":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if tag == "b":
        return bytes.fromhex(rest[0])
    if tag == "h":
        return objects[rest[0]]
    if tag == "q":
        from fractions import Fraction

        return Fraction(int(rest[0], 16), int(rest[1], 16))
    from decimal import Decimal

    return Decimal(rest[0])


def take_stdout() -> int:
    """Return a descriptor of stdout for the result. What else is printed to stdout is then lost."""
    out = os.dup(1)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:
        nowhere = 2
    os.dup2(nowhere, 1)
    return out


def emit(out: int, said: Tree) -> None:
    data = json.dumps(said).encode()
    while data:
        data = data[os.write(out, data) :]
    os._exit(0)


# -- with the program ------------------------------------------------------------------


def answer(payload: str) -> None:
    """Run the program, make calls to it, and print a JSON list of their results. `payload`: JSON
    with the program's "source" and the "calls"."""
    out = take_stdout()
    task = json.loads(payload)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        code = compile(task["source"], "solution.py", "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except BaseException:
        emit(out, ["broken"])
    objects: dict[int, Any] = {}
    results = [
        result_of(number, call, module, objects) for number, call in enumerate(task["calls"])
    ]
    emit(out, ["results", *results])


def result_of(number: int, call: Tree, module: Any, objects: dict[int, Any]) -> Tree:
    kind, target, name, args, kwargs = call
    try:
        given = [decode(arg, objects) for arg in args]
        named = {key: decode(arg, objects) for key, arg in kwargs.items()}
        if kind == "get":
            return ["value", encode(getattr(objects[target], name))]
        function = getattr(objects[target], name) if kind == "method" else find(module, name)
        value = function(*given, **named)
        if type(value) is types.CoroutineType:
            import asyncio

            value = asyncio.run(value)
        if kind == "new":
            objects[number] = value
            return ["object", number]
        return ["value", encode(value), *(changed(given) if value is None else [])]
    except Refused:
        return ["refused"]
    except Exception as error:
        return ["raised", builtin_name(type(error))]
    except BaseException:
        return ["refused"]


def find(module: Any, name: str) -> Any:
    if name not in module.__dict__ and "Solution" in module.__dict__:
        return getattr(module.Solution(), name)
    return getattr(module, name)


def changed(args: list[Any]) -> list[Tree]:
    """Return, for a call that returned nothing, the plain form of each argument that it may have
    changed in place (a list, dict or set), and None for each other argument."""
    return [encode(a) if type(a) in (list, dict, set) else None for a in args]


def builtin_name(kind: type) -> str:
    for base in kind.__mro__:
        if base.__module__ == "builtins":
            return base.__name__
    return "Exception"


# -- without the program ---------------------------------------------------------------


class Pending(BaseException):
    """Raised in a test when it needs a call's result that is not known yet."""


class Calls:
    """The program as a test's code sees it: each call gets its result from a run of the program
    before. A call whose result is not `known` is noted, and ends the code with `Pending`."""

    def __init__(self, known: list[Any], ordered: bool) -> None:
        self.ordered = ordered
        self.count = 0
        self.known = {self._key(n, call): result for n, (call, result) in enumerate(known)}
        self.asked: dict[str, Tree] = {}

    def _key(self, number: int, call: Tree) -> str:
        return f"{number if self.ordered else ''} {json.dumps(call)}"

    def ask(
        self, kind: str, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        named = {key: argument(value) for key, value in kwargs.items()}
        call = [kind, target, name, [argument(value) for value in args], named]
        key = self._key(self.count, call)
        self.count += 1
        if key not in self.known:
            self.asked[key] = call
            raise Pending
        said, *rest = self.known[key]
        if said == "object":
            return Object(self, rest[0])
        if said == "value":
            for old, new in zip(args, rest[1:], strict=False):
                if new is not None:
                    change(old, decode(new))
            return decode(rest[0])
        error = getattr(builtins, rest[0], None) if said == "raised" else None
        if isinstance(error, type) and issubclass(error, Exception):
            ends_loops = issubclass(error, StopIteration | StopAsyncIteration)
            raise RuntimeError("the program") if ends_loops else error.__new__(error)
        raise TypeError("what the program returned has no plain form")


def argument(value: Any) -> Tree:
    if type(value) is Object:
        return ["h", object.__getattribute__(value, "_number")]
    return encode(value)


def change(old: Any, new: Any) -> None:
    if type(old) is list:
        old[:] = new
    elif type(old) in (dict, set):
        old.clear()
        old.update(new)


class Object:
    """Stands in a test for an object that the program made; its methods are calls to the program.
    It is equal only to itself: what the program's object says about equality is no evidence."""

    __iter__ = None  # else an IndexError of __getitem__ would end a loop before its first turn

    def __init__(self, calls: Calls, number: int) -> None:
        self.__dict__.update(_calls=calls, _number=number)

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused("a test cannot set attributes of the program's objects")

    def __getattr__(self, name: str) -> Any:
        return Member(self._calls, self._number, name)


class Member:
    """An attribute of an `Object`. If the test calls it, the program's method is called; if the
    test only reads it, `value_of` gets the program's value."""

    def __init__(self, calls: Calls, number: int, name: str) -> None:
        self.read: Any = lambda: calls.ask("get", number, name, (), {})
        self.call: Any = lambda args, kwargs: calls.ask("method", number, name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(args, kwargs)


def forward(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        return Member(self._calls, self._number, name)(*args)

    return method


for special in ("len", "str", "repr", "getitem", "setitem", "delitem", "contains", "call"):
    setattr(Object, f"__{special}__", forward(f"__{special}__"))


def value_of(member: Any) -> Any:
    return member.read() if type(member) is Member else member


def judge(payload: str) -> None:
    """Run a test's code, which is in `payload` (JSON), and print "passed" and a secret (the nonce),
    "failed", "unfit" and why it fits no program, or "ask" and the calls whose results it needs."""
    out = take_stdout()
    task = json.loads(payload)
    calls = Calls(task["known"], task["ordered"])
    scope: dict[str, Any] = {"__name__": "tests", "_value_of": value_of, "_Pending": Pending}
    for name in task["names"]:
        scope[name] = caller(calls, "new" if name in task["classes"] else "call", name)
    if "random" in task["code"]:
        import random

        random.seed(0)  # the same calls in each pass
    try:
        exec(compile(task["code"], "test.py", "exec", dont_inherit=True), scope)
        said = ["passed", task["nonce"]]
    except BaseException as error:
        said = ["unfit", str(error)] if isinstance(error, Refused) else ["failed"]
    emit(out, ["ask", *calls.asked.values()] if calls.asked else said)


def caller(calls: Calls, kind: str, name: str) -> Any:
    return lambda *args, **kwargs: calls.ask(kind, None, name, args, kwargs)
