"""Reads tool calls in the formats of several models. Deviations of form, such as blanks, are
accepted; wrong content is not. A format is a function that splits the text of a model's message
into words, calls, and malformed calls. Nothing that a model wrote raises an error here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model wrote it: the tool's name, the arguments by name, and an id
    (None: the model wrote none)."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(slots=True)
class Found:
    """What was found in the text of a model's message. `content` is the text without calls."""

    content: str
    calls: list[Call] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    """Texts that began as a call but could not be read as one, unchanged, with their markers."""


Format = Callable[[str, Tools], Found]


def format_of(call: str) -> Format | None:
    """Return the function that reads calls written like `call`, a text that the chat template has
    made. None: the format is not known."""
    if "[TOOL_CALLS]" in call:
        return mistral
    if "<\uff5ctool\u2581call\u2581begin\uff5c>" in call:
        return deepseek
    if "<tool_call>" in call:
        body = qwen_coder_call if "<function=" in call else json_call
        return tagged(glm_call if "<arg_key>" in call else body)
    if call.strip().removeprefix("<|python_tag|>").startswith("{"):
        return bare_json
    return None


Body = Callable[[str, Tools], Call | None]
"""Function that reads the text between a call's markers; None if that is no call."""


def tagged(body: Body, opening: str = "<tool_call>", closing: str = "</tool_call>") -> Format:
    """Make a format in which each call stands between two markers, as in Hermes, Qwen and GLM."""

    def read(text: str, tools: Tools) -> Found:
        words, calls, malformed = [], [], []
        while True:
            before, is_found, rest = text.partition(opening)
            words.append(before)
            if not is_found:
                break
            inside, text = _up_to(opening, closing, rest, body, tools)
            call = None if inside is None else body(inside, tools)
            if call is not None:
                calls.append(call)
            else:
                malformed.append(opening + (rest if inside is None else inside + closing))
        return _found(words, calls, malformed)

    return read


_MAX_SPELT = 16
"""A call's arguments may contain the closing marker, so up to this number of closing
markers is tried as the end of one call. The limit guards against a model that repeats
the marker without end."""


def _up_to(
    opening: str, closing: str, rest: str, body: Body, tools: Tools
) -> tuple[str | None, str]:
    """Split `rest`, the text after a call's `opening` marker, at the call's closing marker. Returns
    the text before that marker (None: there is none) and the text after it. Since an argument may
    contain the marker, the first one before which `body` reads a whole call is chosen, or the very
    first if there is no such."""
    at = first = rest.find(closing)
    for _ in range(_MAX_SPELT):
        if at < 0 or body(rest[:at], tools) is not None:
            break
        again = rest.find(closing, at + 1)
        # A closing marker behind the next call's opening one is that call's.
        at = -1 if opening in rest[at:again] else again
    else:
        at = -1
    if first < 0:
        return None, ""
    end = at if at >= 0 else first
    return rest[:end], rest[end + len(closing) :]


def json_call(body: str, tools: Tools) -> Call | None:
    """Read a call of the form `{"name": ..., "arguments": {...}}` (Llama writes `parameters`).
    None: the text is no call."""
    return call_of(_json(body))


def qwen_coder_call(body: str, tools: Tools) -> Call | None:
    """Read a call of the form `<function=name>` with a `<parameter=name>` for each argument, whose
    text is read by the tool's schema. None: the text is no call."""
    function = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", body, re.DOTALL)
    if function is None:
        return None
    name, inside = function.groups()
    pattern = r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*"
    return _with_arguments(name, inside, pattern, tools)


def glm_call(body: str, tools: Tools) -> Call | None:
    """Read a call that is a name followed by an `<arg_key>` and an `<arg_value>` for each argument.
    None: the text is no call."""
    name, mark, inside = body.partition("<arg_key>")
    if not re.fullmatch(r"\s*[^\s<>{}]+\s*", name):
        return None
    pattern = r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*"
    return _with_arguments(name.strip(), mark + inside, pattern, tools)


def _with_arguments(name: str, inside: str, pattern: str, tools: Tools) -> Call | None:
    arguments: dict[str, Any] = {}
    at, end = 0, len(inside.rstrip())
    while at < end:
        found = re.compile(pattern, re.DOTALL).match(inside, at)
        if found is None or found.group(1) in arguments:
            return None
        arguments[found.group(1)] = _typed(found.group(2), found.group(1), tools.get(name, {}))
        at = found.end()
    return Call(name, arguments) if _is_plain(arguments) else None


def _typed(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of the argument `name`, which the model wrote as `text`: the text itself if
    the tool's `schema` asks for a string or the text is no JSON, else its JSON value."""
    properties = schema.get("properties")
    one = properties.get(name) if isinstance(properties, Mapping) else None
    kind = one.get("type") if isinstance(one, Mapping) else None
    if kind == "string":
        return text
    value = _json(text)
    return text if value is _NOTHING else value


_MISTRAL_CALL = re.compile(
    r"\s*+([^\s\[\]{}]++)\s*+(?:\[CALL_ID\]\s*+(\w++)\s*+)?(?:\[ARGS\])?\s*+(\{.*\})\s*+",
    re.DOTALL,
)
"""Matches a tool's name, perhaps an id, and arguments. Possessive repetition (`*+`) prevents
backtracking: two runs of blanks side by side could otherwise take quadratic time, in which `re`
lets no other thread run."""


def mistral(text: str, tools: Tools) -> Found:
    """Read the calls that follow `[TOOL_CALLS]`: a JSON list of calls, or `name[ARGS]{...}` with
    the marker before each call."""
    words, *parts = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    malformed: list[str] = []
    for part in parts:
        named = _MISTRAL_CALL.fullmatch(part)
        if named is not None:
            name, identity, arguments = named.groups()
            read = [call_of({"name": name, "arguments": _json(arguments), "id": identity})]
        else:
            value = _json(part)
            read = [call_of(one) for one in value] if isinstance(value, list) else []
        if read and None not in read:
            calls += [call for call in read if call is not None]
        else:
            malformed.append("[TOOL_CALLS]" + part)
    return _found([words], calls, malformed)


def deepseek(text: str, tools: Tools) -> Found:
    """Read DeepSeek's calls: `function`, separator, name, JSON block; or name, separator, JSON."""
    left, bar, right = "<\uff5c", "\u2581", "\uff5c>"

    def body(inside: str, tools: Tools) -> Call | None:
        head, _, rest = inside.partition(f"{left}tool{bar}sep{right}")
        block = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```\s*", rest, re.DOTALL)
        name, arguments = (head, rest) if block is None else block.groups()
        return call_of({"name": name.strip(), "arguments": _json(arguments)})

    one = tagged(
        body, f"{left}tool{bar}call{bar}begin{right}", f"{left}tool{bar}call{bar}end{right}"
    )
    for which in ("begin", "end"):
        text = text.replace(f"{left}tool{bar}calls{bar}{which}{right}", "")
    return one(text, tools)


def bare_json(text: str, tools: Tools) -> Found:
    """Read Llama 3's calls: a message that is one call as a whole, or several with `;` between
    them. Any other JSON counts as a plain answer."""
    told = text.strip()
    body = told.removeprefix("<|python_tag|>").lstrip()
    is_meant = body != told or re.match(r'\{\s*"name"\s*:', body) is not None
    if not is_meant:
        return Found(text)
    calls = []
    at = 0
    while at < len(body):
        try:
            value, at = _DECODER.raw_decode(body, at)
        except (ValueError, RecursionError):
            return Found("", malformed=[text])
        call = call_of(value)
        if call is None:
            return Found("", malformed=[text])
        calls.append(call)
        while at < len(body) and body[at] in "; \n\t":
            at += 1
    return Found("", calls) if calls else Found("", malformed=[text])


_NOTHING = object()


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _json(text: str) -> Any:
    """Return the value of a JSON text, or `_NOTHING` if the text is no JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return _NOTHING


def call_of(value: Any) -> Call | None:
    """Return the tool call that a dict with `name` and `arguments` or `parameters` describes. None:
    the value is no such dict."""
    if not isinstance(value, dict):
        return None
    name, identity = value.get("name"), value.get("id")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    if not _is_plain([name, arguments]):
        return None
    return Call(name, arguments, identity if isinstance(identity, str) and identity else None)


def _is_plain(value: Any) -> bool:
    """Whether the value has no lone surrogates, which neither tools nor tokenizers accept, and no
    infinite numbers (1e999)."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError, RecursionError):
        return False
    return True


def _found(words: Sequence[str], calls: list[Call], malformed: list[str]) -> Found:
    if not calls and not malformed:
        return Found("".join(words))
    return Found("\n".join(filter(None, (word.strip() for word in words))), calls, malformed)
