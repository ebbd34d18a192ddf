r"""Mathematical problems with right answers in LaTeX, made from a seed. Nothing to download.

The answers are worked out by whole numbers and fractions, never by a mathematics library, so that
they do not depend on what judges answers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

Problem = tuple[str, str]
"""Question, right answer."""

_TRIES = 1000
ASK = r"{} Put your final answer in \boxed{{}}."


def math_tasks(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` rows with different prompts: prompt, answer, task ("math"), kind.

    Kinds take turns, so that any number of rows has them all about equally often. Raises
    `ValueError` if there are not so many different problems.
    """
    rng = random.Random(f"math tasks/{seed}")
    seen: set[str] = set()
    names = list(KINDS)
    for index in range(count):
        for attempt in range(_TRIES):
            kind = names[(index + attempt // 50) % len(names)]
            question, answer = KINDS[kind](rng)
            if question not in seen:
                break
        else:
            raise ValueError(f"there are no {count} different problems, only {index}")
        seen.add(question)
        yield {"prompt": ASK.format(question), "answer": answer, "task": "math", "kind": kind}


# -- writing -------------------------------------------------------------------------------------


def fraction(value: Fraction | int) -> str:
    """`\frac{a}{b}` in lowest terms, or a whole number."""
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def polynomial(coefficients: list[Fraction] | list[int], variable: str = "x") -> str:
    """Coefficients from the constant upwards."""
    text = ""
    for power in range(len(coefficients) - 1, -1, -1):
        value = Fraction(coefficients[power])
        if value == 0:
            continue
        name = "" if power == 0 else variable if power == 1 else f"{variable}^{{{power}}}"
        size = fraction(abs(value))
        text += ("-" if value < 0 else "+" if text else "") + ("" if size == "1" and name else size)
        text += name
    return text or "0"


def root(number: int) -> str:
    """The square root with what can be taken out of it in front."""
    outside = max(k for k in range(1, math.isqrt(number) + 1) if number % (k * k) == 0)
    inside = number // (outside * outside)
    if inside == 1:
        return str(outside)
    return ("" if outside == 1 else str(outside)) + rf"\sqrt{{{inside}}}"


def _set(values: Any) -> str:
    return r"\{" + ", ".join(str(value) for value in sorted(values)) + r"\}"


def _matrix(rows: list[list[int]]) -> str:
    cells = r" \\ ".join(" & ".join(map(str, row)) for row in rows)
    return rf"\begin{{pmatrix}} {cells} \end{{pmatrix}}"


def _nonzero(rng: random.Random, size: int) -> int:
    return rng.choice([-1, 1]) * rng.randint(1, size)


def _fraction(rng: random.Random) -> Fraction:
    return Fraction(rng.randint(1, 12), rng.randint(2, 12))


def _poly(rng: random.Random, degree: int) -> list[int]:
    return [*(rng.randint(-9, 9) for _ in range(degree)), _nonzero(rng, 6)]


# -- kinds ---------------------------------------------------------------------------------------


def arithmetic(rng: random.Random) -> Problem:
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    return rf"Compute ${a} \cdot {b} - {c}$.", str(a * b - c)


def remainder(rng: random.Random) -> Problem:
    a, b = rng.randint(100, 9999), rng.randint(3, 97)
    return f"What is the remainder when {a} is divided by {b}?", str(a % b)


def fraction_sum(rng: random.Random) -> Problem:
    a, b = _fraction(rng), _fraction(rng)
    return f"Compute ${fraction(a)} + {fraction(b)}$ in lowest terms.", fraction(a + b)


def fraction_quotient(rng: random.Random) -> Problem:
    a, b = _fraction(rng), _fraction(rng)
    return rf"Compute ${fraction(a)} \div {fraction(b)}$ in lowest terms.", fraction(a / b)


def mixed_numbers(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 20) + _proper(rng), rng.randint(1, 20) + _proper(rng)
    question = f"Add ${_mixed(a)}$ and ${_mixed(b)}$. Answer as a mixed number."
    return question, _mixed(a + b)


def _proper(rng: random.Random) -> Fraction:
    bottom = rng.randint(2, 9)
    return Fraction(rng.randint(1, bottom - 1), bottom)


def _mixed(value: Fraction) -> str:
    whole, rest = divmod(value, 1)
    return f"{whole}{fraction(rest) if rest else ''}"


def power(rng: random.Random) -> Problem:
    a, n = rng.randint(2, 9), rng.randint(3, 6)
    return f"What is {a} to the power of {n}?", str(a**n)


def square_root(rng: random.Random) -> Problem:
    outside, inside = rng.randint(2, 12), rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    number = outside**2 * inside
    return rf"Simplify $\sqrt{{{number}}}$.", root(number)


def rationalise(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 9), rng.choice([2, 3, 5, 6, 7, 11])
    share = math.gcd(a, b)
    top = ("" if a == share else str(a // share)) + rf"\sqrt{{{b}}}"
    answer = top if b == share else rf"\frac{{{top}}}{{{b // share}}}"
    return rf"Rationalise the denominator of $\frac{{{a}}}{{\sqrt{{{b}}}}}$.", answer


def linear_equation(rng: random.Random) -> Problem:
    a, b, c = _nonzero(rng, 12), rng.randint(-30, 30), rng.randint(-30, 30)
    return f"Solve ${polynomial([b, a])} = {c}$ for $x$.", f"x={fraction(Fraction(c - b, a))}"


def quadratic_equation(rng: random.Random) -> Problem:
    p, q = rng.randint(-12, 12), rng.randint(-12, 12)
    equation = polynomial([p * q, -(p + q), 1])
    return f"Find the set of all solutions of ${equation} = 0$.", _set({p, q})


def quadratic_roots(rng: random.Random) -> Problem:
    h, d = rng.randint(-9, 9), rng.choice([2, 3, 5, 6, 7, 8, 10, 12])
    equation = polynomial([h * h - d, -2 * h, 1])
    return f"Solve ${equation} = 0$.", rf"x={h or ''}\pm {root(d)}" if h else rf"x=\pm {root(d)}"


def linear_system(rng: random.Random) -> Problem:
    x, y = rng.randint(-9, 9), rng.randint(-9, 9)
    a, b, c = _nonzero(rng, 7), _nonzero(rng, 7), _nonzero(rng, 7)
    d = rng.choice([k for k in range(-7, 8) if k and a * k != b * c])
    first = f"{_terms(a, b)} = {a * x + b * y}"
    second = f"{_terms(c, d)} = {c * x + d * y}"
    return f"Solve the system ${first}$, ${second}$. Give $(x, y)$.", f"({x}, {y})"


def _terms(a: int, b: int) -> str:
    return polynomial([0, a]) + ("+" if b > 0 else "") + polynomial([0, b], "y")


def inequality(rng: random.Random) -> Problem:
    a, b, c = rng.randint(2, 9), rng.randint(-20, 20), rng.randint(-20, 20)
    bound = fraction(Fraction(c - b, a))
    sign, answer = rng.choice(
        [
            ("<", rf"(-\infty, {bound})"),
            (r"\ge", rf"[{bound}, \infty)"),
            (">", rf"({bound}, \infty)"),
        ]
    )
    question = f"Solve ${polynomial([b, a])} {sign} {c}$. Answer as an interval."
    return question, answer


def absolute_inequality(rng: random.Random) -> Problem:
    h, r = rng.randint(-9, 9), rng.randint(1, 12)
    inside = polynomial([-h, 1])
    return f"Which interval is $|{inside}| \\le {r}$?", f"[{h - r}, {h + r}]"


def quadratic_inequality(rng: random.Random) -> Problem:
    p = rng.randint(-9, 8)
    q = rng.randint(p + 1, 9)
    left = polynomial([p * q, -(p + q), 1])
    return f"Solve ${left} > 0$.", rf"(-\infty, {p}) \cup ({q}, \infty)"


def derivative(rng: random.Random) -> Problem:
    f = _poly(rng, rng.randint(2, 4))
    slope = [k * c for k, c in enumerate(f)][1:]
    return f"Differentiate ${polynomial(f)}$ with respect to $x$.", polynomial(slope)


def antiderivative(rng: random.Random) -> Problem:
    f = _poly(rng, rng.randint(1, 3))
    whole = [Fraction(0), *(Fraction(c, k + 1) for k, c in enumerate(f))]
    question = rf"Find $\int \left({polynomial(f)}\right) dx$, with the constant $C$."
    return question, polynomial(whole) + "+C"


def definite_integral(rng: random.Random) -> Problem:
    f, b = _poly(rng, 2), rng.randint(1, 5)
    value = sum(Fraction(c * b ** (k + 1), k + 1) for k, c in enumerate(f))
    return rf"Evaluate $\int_0^{{{b}}} \left({polynomial(f)}\right) dx$.", fraction(value)


def expansion(rng: random.Random) -> Problem:
    a, b, c, d = _nonzero(rng, 5), rng.randint(-9, 9), _nonzero(rng, 5), rng.randint(-9, 9)
    question = f"Expand $({polynomial([b, a])})({polynomial([d, c])})$."
    return question, polynomial([b * d, a * d + b * c, a * c])


def evaluation(rng: random.Random) -> Problem:
    f, x = _poly(rng, 3), rng.randint(-4, 4)
    value = sum(c * x**k for k, c in enumerate(f))
    return f"Let $f(x) = {polynomial(f)}$. What is $f({x})$?", str(value)


def divisors(rng: random.Random) -> Problem:
    n = rng.randint(12, 300)
    return f"List the set of all positive divisors of {n}.", _set(
        k for k in range(1, n + 1) if n % k == 0
    )


def intersection(rng: random.Random) -> Problem:
    a = set(rng.sample(range(1, 15), rng.randint(4, 7)))
    b = set(rng.sample(range(1, 15), rng.randint(4, 7)))
    both = _set(a & b) if a & b else r"\emptyset"
    return rf"Find ${_set(a)} \cap {_set(b)}$.", both


def choosing(rng: random.Random) -> Problem:
    n = rng.randint(4, 16)
    k = rng.randint(2, n - 1)
    return f"In how many ways can {k} of {n} people be chosen for a team?", str(math.comb(n, k))


def arranging(rng: random.Random) -> Problem:
    n = rng.randint(3, 9)
    k = rng.randint(2, n)
    question = f"How many ways are there to put {k} of {n} different books in a row on a shelf?"
    return question, str(math.perm(n, k))


def probability(rng: random.Random) -> Problem:
    red, blue = rng.randint(2, 12), rng.randint(2, 12)
    total = red + blue
    question = (
        f"A bag has {red} red and {blue} blue balls. Two are drawn without putting any back. How"
        " likely is it that both are red?"
    )
    return question, fraction(Fraction(red * (red - 1), total * (total - 1)))


def percentage(rng: random.Random) -> Problem:
    part = rng.choice([4, 5, 8, 10, 12, 15, 20, 25, 30, 40, 45, 60, 75])
    whole = 20 * rng.randint(2, 30)
    return f"How much is {part}% of {whole}?", fraction(Fraction(part * whole, 100))


def percent_change(rng: random.Random) -> Problem:
    old, change = 20 * rng.randint(2, 30), 5 * rng.randint(1, 16)
    new = Fraction(old * (100 + change), 100)
    question = rf"A price rises from \${old} to \${float(new):g}. By how many percent does it rise?"
    return question, rf"{change}\%"


def speed(rng: random.Random) -> Problem:
    pace, hours = rng.randint(30, 120), rng.randint(2, 9)
    question = f"A train travels {pace * hours} km in {hours} hours. How fast is it on average?"
    return question, rf"{pace}\text{{ km/h}}"


def area(rng: random.Random) -> Problem:
    a, b = rng.randint(3, 40), rng.randint(3, 40)
    question = f"A triangle has a base of {a} cm and a height of {b} cm. What is its area?"
    return question, rf"{fraction(Fraction(a * b, 2))}\text{{ cm}}^2"


def circle(rng: random.Random) -> Problem:
    r = rng.randint(2, 60)
    return f"What is the exact area of a circle of radius {r}?", rf"{r * r}\pi"


def hypotenuse(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    question = f"A right triangle has legs of {a} and {b}. How long is the hypotenuse, exactly?"
    return question, root(a * a + b * b)


def angle(rng: random.Random) -> Problem:
    a = rng.randint(20, 100)
    b = rng.randint(10, 170 - a)
    question = rf"Two angles of a triangle are ${a}^\circ$ and ${b}^\circ$. What is the third?"
    return question, rf"{180 - a - b}^\circ"


def matrix_product(rng: random.Random) -> Problem:
    a, b = ([[rng.randint(-5, 5) for _ in range(2)] for _ in range(2)] for _ in range(2))
    product = [[sum(a[i][k] * b[k][j] for k in range(2)) for j in range(2)] for i in range(2)]
    return f"Compute ${_matrix(a)} {_matrix(b)}$.", _matrix(product)


def determinant(rng: random.Random) -> Problem:
    (a, b), (c, d) = rows = [[rng.randint(-9, 9) for _ in range(2)] for _ in range(2)]
    return f"What is the determinant of ${_matrix(rows)}$?", str(a * d - b * c)


def dot_product(rng: random.Random) -> Problem:
    a, b = (tuple(rng.randint(-9, 9) for _ in range(3)) for _ in range(2))
    value = sum(x * y for x, y in zip(a, b, strict=True))
    return f"Find the dot product of ${a}$ and ${b}$.", str(value)


def complex_product(rng: random.Random) -> Problem:
    a, b, c, d = (_nonzero(rng, 9) for _ in range(4))
    first, second = polynomial([a, b], "i"), polynomial([c, d], "i")
    real, imaginary = a * c - b * d, a * d + b * c
    if imaginary == 0:
        return f"Multiply $({first})({second})$.", str(real)
    written = (str(real) if real else "") + ("+" if real and imaginary > 0 else "")
    return f"Multiply $({first})({second})$.", written + polynomial([0, imaginary], "i")


def logarithm(rng: random.Random) -> Problem:
    base, n = rng.randint(2, 9), rng.randint(2, 5)
    return rf"What is $\log_{{{base}}} {base**n}$?", str(n)


def scientific(rng: random.Random) -> Problem:
    a, b, m, n = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    question = rf"Write $({a} \times 10^{{{m}}})({b} \times 10^{{{n}}})$ in scientific notation."
    size, product = m + n, a * b
    if product >= 10:
        size += 1
    factor = f"{product / 10:g}" if product >= 10 else str(product)
    return question, rf"{factor} \times 10^{{{size}}}"


def line(rng: random.Random) -> Problem:
    m, x, y = _nonzero(rng, 9), _nonzero(rng, 9), rng.randint(-9, 9)
    question = f"Find the equation $y = \\ldots$ of the line of slope {m} through $({x}, {y})$."
    return question, f"y={polynomial([y - m * x, m])}"


def parity(rng: random.Random) -> Problem:
    a, b = rng.randint(2, 99), rng.randint(2, 9)
    even = (a**b) % 2 == 0
    return f"Is ${a}^{{{b}}}$ even or odd?", r"\text{even}" if even else r"\text{odd}"


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    kind.__name__: kind
    for kind in (
        *(arithmetic, remainder, fraction_sum, fraction_quotient, mixed_numbers, power),
        *(square_root, rationalise, linear_equation, quadratic_equation, quadratic_roots),
        *(linear_system, inequality, absolute_inequality, quadratic_inequality, derivative),
        *(antiderivative, definite_integral, expansion, evaluation, divisors, intersection),
        *(choosing, arranging, probability, percentage, percent_change, speed, area, circle),
        *(hypotenuse, angle, matrix_product, determinant, dot_product, complex_product),
        *(logarithm, scientific, line, parity),
    )
}
"""By name; each draws a problem."""
