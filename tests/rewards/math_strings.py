r"""Fuzzed answers, and an oracle of its own for those that the reward calls right.

Nothing here shares code with the checker: the oracle reads a small part of LaTeX by recursive
descent and compares values at points, with fractions and floats.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from tests.rewards.math_corpus import RIGHT, WRONG

ALPHABET = (
    *"0123456789+-*/^=<>(){}[]|,.;:!%_&$\\ xyzeiEINS\n\t'\"~#@?",
    *(r"\frac", r"\sqrt", r"\pi", r"\text{", r"\cdot", r"\times", r"\infty", r"\pm", r"\cup"),
    *(r"\boxed{", r"\le", r"\in", r"\{", r"\}", r"\left(", r"\right)", r"\int", r"\sum_{k=1}^{9}"),
    *(r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\sin", r"\log_", r"\binom", r"\overline{"),
    *("−", "½", "²", "π", "∞", "１", "٣", "\u202e", "\u200b", "\x00", "\ud800", "nan", "inf"),
    *("__import__('os')._exit(77)", "lambda:0", "exec('1')"),
)


def fuzzed(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Pairs of a right answer and a response."""
    rng = random.Random(f"math fuzz/{seed}")
    for index in range(count):
        gold, answer = MAKERS[index % len(MAKERS)](rng)
        yield gold, _response(answer, rng)


def _response(answer: str, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.8:
        return rf"Therefore it is \boxed{{{answer}}}."
    if draw < 0.85:
        return rf"\boxed{{{answer}"
    if draw < 0.9:
        return rf"\boxed{{{rng.choice(RIGHT)[1]}}} so \boxed{{{answer}}}"
    if draw < 0.95:
        return f"The answer is {answer}"
    return f"#### {answer}"


def _gold(rng: random.Random) -> str:
    return rng.choice(RIGHT)[0]


def _expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        number = str(rng.randint(0, 30))
        return rng.choice([number, number, f"{number}.{rng.randint(0, 99)}", "x", "y", r"\pi", "e"])
    a, b = _expression(rng, depth - 1), _expression(rng, depth - 1)
    return rng.choice(
        [
            *(f"{a}+{b}", f"{a}-{b}", rf"{a}\cdot {b}", rf"\frac{{{a}}}{{{b}}}", f"({a})({b})"),
            *(f"({a})^{rng.randint(0, 4)}", rf"\sqrt{{{a}}}", f"-({a})", rf"({a})/({b})"),
            *(f"{a}, {b}", f"({a},{b})", rf"\{{{a},{b}\}}", rf"\sin({a})", rf"\ln({a})"),
            *(rf"{a}\pm {b}", f"x={a}", f"{a}=={b}", rf"{a}\%", rf"{a}\text{{ cm}}", f"|{a}|"),
        ]
    )


def _grammar(rng: random.Random) -> tuple[str, str]:
    first = _expression(rng, rng.randint(1, 3))
    return first, (
        _expression(rng, rng.randint(1, 3)) if rng.random() < 0.7 else _mutate(first, rng)
    )


def _mutate(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        at, to = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        match rng.randint(0, 3):
            case 0:
                text = text[:at] + text[at + 1 :]
            case 1:
                text = text[:at] + rng.choice(ALPHABET) + text[at:]
            case 2:
                text = text[:at] + text[at:to] + text[at:]
            case _:
                text = text[:at] + rng.choice(ALPHABET) + text[at + 1 :]
    return text


def _mutation(rng: random.Random) -> tuple[str, str]:
    gold, answer = rng.choice(RIGHT if rng.random() < 0.7 else WRONG)
    return gold, _mutate(answer, rng)


def _raw(rng: random.Random) -> tuple[str, str]:
    data = rng.randbytes(rng.randint(0, 200))
    coding = rng.choice(["latin-1", "utf-8", "utf-16-le"])
    return _gold(rng), data.decode(coding, errors="ignore")


def _soup(rng: random.Random) -> tuple[str, str]:
    return _gold(rng), "".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 40)))


def _splice(rng: random.Random) -> tuple[str, str]:
    gold, answer = rng.choice(RIGHT)
    joint = rng.choice(
        [" or ", ", ", "=", r" \text{ or } ", "+", "", " ", r"\cup ", "\\boxed{", "}"]
    )
    pair = [answer, rng.choice(RIGHT)[1]]
    rng.shuffle(pair)
    return gold, joint.join(pair)


def _nasty(rng: random.Random) -> tuple[str, str]:
    n = int(10 ** rng.uniform(0, 4))
    small = rng.randint(1, 30)
    return _gold(rng), rng.choice(
        [
            *("9^{" * small + "9" + "}" * small, "(" * small + "x" + ")" * small, f"{n}!"),
            *("1" * n, "1," * n + "1", f"x^{{{n}}}-1", rf"\binom{{{n}}}{{{n // 2}}}", f"2^{{{n}}}"),
            *(r"\frac{1}{1+" * small + "1" + "}" * small, r"\sqrt{" * small + "2" + "}" * small),
            *(rf"\sum_{{k=1}}^{{{n}}} k^{{-2}}", rf"\int_0^1 x^{{{n}}} dx", "+".join("x" * small)),
            *(f"(x+1)^{{{n}}}-(x-1)^{{{n}}}", "{" * small + "1" + "}" * small, "-" * small + "1"),
            *(
                " & ".join("1" * small),
                r"1 \\ " * small,
                rf"e^{{e^{{{small}}}}}",
                "|" * small + "1",
            ),
            *(
                rf"\sin({n}^{{{small}}})",
                f"{n}^{{-{n}}}",
                rf"\log_{{{n}}} {n}",
                "nan",
                r"0\cdot\infty",
            ),
            *(
                rf"{n}^{{{n}}}^{{{n}}}",
                rf"(({n}^{{{n}}})^{{{n}}})^{{{n}}}",
                "x" * small,
                "=" * small,
            ),
            *(
                " " * n + "3",
                r"\text{" + "a" * n + "}",
                "\\" * small,
                r"\left" * small,
                "$" * small,
            ),
        ]
    )


MAKERS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    *(_grammar, _mutation, _raw, _soup, _splice, _nasty),
)

# -- the oracle ----------------------------------------------------------------------------------

_POINTS = (
    {"x": 0.7310585, "y": 1.618034, "a": 2.3, "b": 0.9, "c": 1.1, "n": 3.7, "m": 1.9},
    {"x": 2.2360679, "y": 0.5772157, "a": 1.7, "b": 3.1, "c": 0.4, "n": 5.2, "m": 0.6},
)


def may_be_right(gold: str, response: str) -> bool:
    """The oracle finds them equal too, or somebody has looked."""
    answer = _last_answer(response)
    named = re.sub(r"^(?:[a-z]{1,3}|\\text\{[a-z]+\})=", "", _plain(answer))
    named = re.sub(r"\\text\{[a-z]*\}$", "", named)
    known = {(_plain(gold), _plain(answer)), (_plain(gold), named)} & _REVIEWED
    return bool(known) or _same(gold, answer)


def _last_answer(response: str) -> str:
    starts = [found.end() for found in re.finditer(r"\\(?:boxed|fbox)\{", response)]
    if not starts:
        return re.split("answer is |#### ", response)[-1].split("\n")[0].strip().rstrip(".")
    depth, start = 1, starts[-1]
    for index in range(start, len(response)):
        escaped = response[index - 1] == "\\" and response[index - 2] != "\\"
        if response[index] in "{}" and not escaped:
            depth += 1 if response[index] == "{" else -1
            if depth == 0:
                return response[start:index]
    return response[start:]


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:left|right|,|!|;|:| |displaystyle)|\$|\\\(|\\\)", "", text)
    text = re.sub('[\u200b\u202e\ufeff~\\s"]', "", text).translate(
        str.maketrans("−–１２٣", "--123")
    )
    text = text.replace("½", r"\frac{1}{2}").replace("π", r"\pi").replace("∞", r"\infty")
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("²", "^2").replace("**", "^")
    text = re.sub(r"\\\\(?=[a-z(])", r"\\", text).replace("percent", r"\%")
    text = text.rstrip(".,;").casefold()
    return re.sub(r"(?<=\d)e(-?\d+)", r"\\cdot10^{\1}", text)


_REVIEWED = {
    (_plain(gold), _plain(answer))
    for gold, answer in (
        *RIGHT,
        ("B", r"\sqrtB\sqrtB"),
        (r"\sin^2 x", r"1-\cos^2 x+0.0"),
        ("[3,\\infty)", "xnn>=3"),
        (r"\frac{1}{3}", r".\overline{3}"),
        (r"x=\{y,y\}", "y"),
        ("x", r"\\left(x"),
        ("3", r"\{3\}=3"),
        ("f'(x)", "f'(x)-0"),
        ("[0,1]", r"[-0,\frac{2}{2}]"),
        (r"50\%", r"50=\tfrac12"),
        (r"\{1,2\}", r"\left\{1, 2\right, 2\right\}"),
        ("(25.98)^0", "(25.9'8)\"^0"),
        (r"x=\ln(26.86\cdot 26)", r"x１=\ln(26.86\cdot  26)"),
    )
}
"""Right answer and answer, read by a person and found equal under the policy."""


def _same(gold: str, answer: str) -> bool:
    one, other = _plain(gold), _plain(answer)
    if one == other:
        return True
    sides = re.sub(r"^[a-z]=", "", other).split("=")
    if len(sides) > 1 and "=" not in one and all(_same(one, side) for side in sides):
        return True
    if one.endswith("%") != other.endswith("%"):
        share, plain = (one, other) if one.endswith("%") else (other, one)
        share = share.rstrip("\\%")
        return _equal(f"({share})/100", plain) or (len(plain) > 1 and _equal(share, plain))
    parts = _elements(one), _elements(other)
    if len(parts[0]) == len(parts[1]):
        return all(map(_equal, *parts)) or all(map(_equal, *map(sorted, parts)))
    return False


def _elements(text: str) -> list[str]:
    text = re.sub(r"(\d),(\d{3})(?!\d)", r"\1\2", text)
    text = re.sub(r"^(\\\{|\()(.*,.*)(\\\}|\))$", r"\2", text)
    text = re.sub(r"\\text\{(?:or|and)\}|or|and", ",", text)
    text = re.sub(r"^\\pm(.*)$", r"\1,-\1", text)
    return [re.sub(r"^\\?[a-z]+(?:\([a-z]\))?=", "", part) for part in text.split(",")]


def _equal(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        for point in _POINTS:
            a, b = _Oracle(one, point).value(), _Oracle(other, point).value()
            if not math.isclose(a, b, rel_tol=1e-5 if "." in one + other else 1e-9, abs_tol=1e-300):
                return False
    except (ValueError, ZeroDivisionError, OverflowError, TypeError, RecursionError):
        return False
    return True


class _Oracle:
    """sums of products of powers, by recursive descent; ValueError for anything else."""

    def __init__(self, text: str, point: dict[str, float]) -> None:
        text = re.sub(
            r"\\text\{[a-z/ ]*\}(?:\^\{?\d\}?)?$|\^\{?\\circ\}?$|(?<=\d)(?:cm|h)$", "", text
        )
        self.percent = bool(re.search(r"\\?%$", text))
        text = re.sub(r"\\?%$", "", text)
        self.tokens = re.findall(r"\\[a-z]+|\d+\.?\d*|\.\d+|.", text)
        self.at = 0
        self.point = point

    def value(self) -> float:
        result = self.sum()
        if self.at != len(self.tokens) or isinstance(result, complex):
            raise ValueError("more text")
        return result

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if wanted and token not in wanted:
            raise ValueError(f"{token} for {wanted}")
        self.at += 1
        return token

    def sum(self) -> float:
        total = self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            total += sign * self.product()
        return total

    def product(self) -> float:
        result = self.signed()
        while (token := self.peek()) and token not in ("+", "-", ")", "}", "|", "="):
            if token in (r"\cdot", r"\times", "*"):
                self.take()
                result *= self.signed()
            elif token == "/":
                self.take()
                result /= self.signed()
            else:
                result *= self.power()
        return result

    def signed(self) -> float:
        if self.peek() in ("+", "-"):
            return (1 if self.take() == "+" else -1) * self.signed()
        return self.power()

    def power(self) -> float:
        base = self.atom()
        if self.peek() == "^":
            self.take()
            base = float(base) ** (self.group() if self.peek() == "{" else self.atom())
        if self.peek() == "!":
            self.take()
            base = float(math.factorial(int(base)))
        return base

    def group(self) -> float:
        self.take("{")
        inside = self.sum()
        self.take("}")
        return inside

    def atom(self) -> float:
        token = self.take()
        if re.fullmatch(r"[\d.]+", token):
            mixed = self.peek() == r"\frac" and "." not in token
            rest = self.atom() if mixed else 0.0
            return float(Fraction(token)) + rest
        if token == r"\frac":
            top = self.group() if self.peek() == "{" else float(self.take()[:1])
            return top / (self.group() if self.peek() == "{" else float(self.take()))
        if token == r"\binom":
            return float(math.comb(int(self.group()), int(self.group())))
        if token == r"\sqrt":
            return math.sqrt(self.group() if self.peek() == "{" else self.atom())
        if token in ("(", "{"):
            self.at -= 1
            closing = {"(": ")", "{": "}"}[self.take()]
            inside = self.sum()
            self.take(closing)
            return inside
        if token == "|":
            inside = self.sum()
            self.take("|")
            return abs(inside)
        if token in (r"\sin", r"\cos", r"\ln"):
            function = {r"\sin": math.sin, r"\cos": math.cos, r"\ln": math.log}[token]
            return function(self.power())
        known = {r"\pi": math.pi, "e": math.e, **self.point}
        if token in known:
            return known[token]
        raise ValueError(token)
