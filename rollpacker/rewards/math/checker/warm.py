r"""Importing this module prepares the checker of math answers: its modules, patterns and parser
tables.

It is for the sandbox's warm interpreters alone: what is loaded before the fork costs a run nothing.
The parser builds its tables as it meets new forms, tens of milliseconds each, so it is shown the
common forms here. The text is fixed; no answer comes near a warm interpreter.
"""

from __future__ import annotations

from rollpacker.rewards.math.checker.check import Comparison, judge

PAIRS = (
    ("3", "4"),
    (r"\frac{1}{2}", "0.25"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\frac{\sqrt[3]{3}}{2}", r"-\frac{1+\sqrt{5}}{2\cdot 3}"),
    (r"36\pi+e", r"e+36\cdot\pi"),
    (r"2^{10}+3x^2y-(x-1)(x+2)", r"(x+y)^{-2}\cdot n(n+1)/2"),
    (r"\sin^2 x+\cos(2x)-\tan\frac{x}{2}", r"\arctan x+\sin^{-1} x"),
    (r"\log_2 3+\ln|x|+C", r"\frac{\ln 3}{\ln 2}+\log(x)+e^{2x}"),
    (r"a_1+a_{12}+\alpha", r"\beta+f(x)-|x-1|"),
    (r"5!+\binom{5}{2}\cdot x", r"x\times 3"),
    ("x^2+y^2=25", "y^2+x^2=24"),
    ("2x+y<3", r"2x+y \le 3"),
    ("(1,2]", "x>3"),
    (r"\{1,2\}", r"\pm 3"),
    (r"\begin{pmatrix}1&a\\3&4\end{pmatrix}", r"\begin{pmatrix}1&b\\3&4\end{pmatrix}"),
    (r"3\text{ cm}", r"50\%"),
    (r"\text{yes}", "no"),
    ("x", "(((x"),
    (r"\sqrt{x}", r"\foo{3}"),
)

_comparison = Comparison(form="evaluated", percent="lenient", min_digits=6)
for _gold, _answer in PAIRS:
    judge(_gold, _answer, _comparison)
