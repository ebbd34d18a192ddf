r"""Answers in the formats of public benchmarks, with the truth known by construction.

Nothing is copied from a benchmark. Each entry has a right answer as such a data set would state it,
other spellings of the same value, and answers of another value. `pairs` puts them into responses
that end as responses to that benchmark do.
"""

# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

BOXED = (
    r"Adding both sides gives \(2x = 10\), so \(x = 5\). Hence the answer is \[\boxed{%s}\]",
    r"<think>First I try 7, which fails.</think> Therefore $\boxed{%s}$.",
    r"We first had $\boxed{99}$, which was an error; the final answer is $\boxed{%s}$.",
    "**Final Answer**\n\\[\n\\boxed{%s}\n\\]",
)
HASHES = ("She buys 2 * 3 = <<2*3=6>>6 more.\n#### %s", "5 - 3 = 2, and so on.\n\n#### %s\n")
MINERVA = (
    r"Final Answer: The final answer is $%s$. I hope it is correct.",
    r"So the answer is $%s$.",
)
CHOICE = ("The answer is %s.", r"Of the choices this is $\boxed{%s}$.", "**Answer: %s**")

Entry = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Right answer, other spellings of it, answers of another value."""


class Format(NamedTuple):
    name: str
    responses: tuple[str, ...]
    entries: tuple[Entry, ...]


class Pair(NamedTuple):
    format: str
    gold: str
    response: str
    is_right: bool


FORMATS = (
    Format(
        "GSM8K: a number behind ####",
        HASHES,
        (
            ("72", ("72", "72.0", "72.00", "$72", "072"), ("71", "-72", "7.2", "720", "72, 73")),
            ("1,250", ("1250", "1,250", "$1,250", "1250.00", "1,250.0"), ("1.25", "125", "12,50")),
            ("0", ("0", "0.0", "$0"), ("1", "10", "none")),
            ("18", ("18", "18 dollars", "$18.00", "18 eggs"), ("18.5", "81", "1 8", "180")),
            ("-5", ("-5", "-5.0", "−5"), ("5", "-50", "5-")),
            ("45,000", ("45000", "$45,000", "45,000 dollars"), ("45", "4500", "450,000")),
            ("0.5", ("0.5", ".5", "1/2", "50%"), ("5", "0.05", "2", "0.5%")),
            ("104", ("104", "104 hours", "104."), ("10", "14", "1004")),
        ),
    ),
    Format(
        "AIME: a whole number from 0 to 999",
        BOXED,
        (
            ("073", ("73", "073", "73.0"), ("37", "730", "7 3", "07", "0.73")),
            ("540", ("540", "540.", r"540\,"), ("54", "5400", "504", r"5 \cdot 40")),
            ("7", ("007", "7", "+7"), ("-7", "77", "70", "7!")),
            ("204", ("204", r"\text{204}", r"\mathbf{204}"), ("240", "2 04", "20.4", "204.1")),
            ("0", ("000", "0"), ("100", r"\emptyset", "00.1")),
        ),
    ),
    Format(
        "MATH: fractions and roots",
        BOXED,
        (
            (r"\frac{3}{4}", (r"\dfrac{3}{4}", "3/4", "0.75", r"\frac34", r"\frac{6}{8}"), ()),
            (r"\frac{3}{4}", (r"\tfrac{3}{4}",), (r"\frac{4}{3}", "0.7", "34", r"-\frac{3}{4}")),
            (r"-\frac{1}{2}", (r"\frac{-1}{2}", "-0.5", r"-\dfrac12"), (r"\frac12", "-2", "-12")),
            (r"2\sqrt{3}", (r"\sqrt{12}", r"2 \sqrt 3", r"\sqrt{3}\cdot 2"), (r"3\sqrt{2}",)),
            (r"2\sqrt{3}", (r"2\cdot\sqrt{3}",), ("6", r"\sqrt{6}", r"2+\sqrt{3}", "23")),
            (r"\frac{\sqrt{2}}{2}", (r"\frac{1}{\sqrt{2}}", r"\sqrt{1/2}"), (r"\sqrt{2}",)),
            (r"\frac{1+\sqrt{5}}{2}", (r"\frac{\sqrt{5}+1}{2}",), (r"\frac{1-\sqrt{5}}{2}",)),
            (r"36\pi", (r"36 \pi", r"\pi\cdot 36", "36π"), ("36", r"36\pi^2", "113", r"6\pi")),
            (r"\sqrt[3]{4}", (r"4^{1/3}", r"2^{2/3}"), (r"\sqrt{4}", r"\sqrt[4]{3}", "3")),
            (r"\frac{\pi}{6}", (r"\pi/6", r"\frac{1}{6}\pi"), (r"\frac{6}{\pi}", "30", r"\pi6")),
            (r"2^{10}", ("1024", "2^{10}"), ("20", "1000", "2^{11}", "210")),
            (r"10^{-2}", ("0.01", r"\frac{1}{100}", "10^-2"), ("-100", "100", "8")),
        ),
    ),
    Format(
        "mixed numbers",
        BOXED,
        (
            ("1 1/2", (r"1\frac{1}{2}", "1.5", "3/2", r"\frac32"), ("11/2", "1/2", "12", "1 1/3")),
            (r"2\frac{3}{4}", ("2 3/4", "2.75", "11/4"), ("23/4", "6/4", r"\frac{23}{4}", "2.34")),
            (r"-3\frac{1}{3}", (r"-\frac{10}{3}", "-3 1/3"), (r"-\frac{8}{3}", "-31/3", "-1")),
            ("11/2", (r"5\frac12", "5.5"), ("1 1/2", r"1\frac{1}{2}", "112")),
            ("12", ("12", "12.0"), ("1 2", "1, 2", "1.2")),
        ),
    ),
    Format(
        "decimals and powers of ten",
        BOXED,
        (
            (r"1.2\times 10^5", ("120000", "120,000", r"1.2\cdot 10^{5}", "1.2e5"), ("1.2", "12")),
            (r"3.0\times 10^{-4}", ("0.0003", r"3\times 10^{-4}", "3e-4"), ("0.003", "-30000")),
            ("0.125", ("1/8", r"\frac{1}{8}", ".125", "0.1250"), ("0.13", "125", "1.25", "0.12")),
            (r"\frac{1}{3}", (r"0.\overline{3}", "0.33333333"), ("0.3", "0.33", "3", "0.4")),
            ("6.25", ("6.25", "25/4", r"6\frac14"), ("6,25", "625", "6.2", "6.3")),
        ),
    ),
    Format(
        "multiple choice",
        CHOICE,
        (
            ("B", ("B", "(B)", r"\text{B}", r"\textbf{(B)}"), ("C", "A", "A or B", "AB")),
            ("C", ("C", r"\mathrm{C}", "(C)", r"\mathbf{C}"), ("D", "(A)", "E", "B, C")),
            ("A", ("A", r"\text{(A)}", "(A)"), ("B", "(E)", "1", "A and D")),
            (r"\text{D}", ("D", "(D)", r"\text{D}"), ("A", r"\text{E}", "O")),
        ),
    ),
    Format(
        "intervals and inequalities",
        BOXED,
        (
            ("[2,5)", (r"[2, 5)", r"\left[2,5\right)", r"2 \le x < 5"), ("(2,5)", "[2,5]", "2,5")),
            (r"(-\infty,3]", (r"x \le 3", r"(-\infty, 3]"), (r"(-\infty,3)", r"[3,\infty)", "3")),
            (r"(-\infty,1)\cup(4,\infty)", (r"(4,\infty)\cup(-\infty,1)",), (r"(1,4)",)),
            (r"(0,1)", (r"0<x<1", r"\left(0,1\right)"), (r"0\le x<1", "[0,1]", "(1,0)")),
            (r"x>7", (r"7<x", r"(7,\infty)"), (r"x\ge 7", "x<7", r"(-\infty,7)", "7")),
            (r"[-1,1]", (r"-1\le x\le 1", r"\left[-1,1\right]"), ("(-1,1)", r"\{-1,1\}", "[-1,2]")),
        ),
    ),
    Format(
        "tuples and points",
        BOXED,
        (
            ("(3,-2)", (r"(3, -2)", r"\left(3,-2\right)", r"x=3, y=-2"), ("(-2,3)", "(3,2)", "1")),
            (r"(1,\frac12,0)", (r"(1, 0.5, 0)", r"\left(1,\tfrac{1}{2},0\right)"), ("(1,0.5)",)),
            (r"\left(2,\frac{\pi}{3}\right)", (r"(2, \pi/3)",), (r"(2,\frac{3}{\pi})", "(2,60)")),
            ("(0,0)", ("(0, 0)", "(0.0, 0)"), ("0", "(0,1)", r"\{0\}")),
            (r"(a,b)=(2,5)", ("(2,5)", "a=2, b=5"), ("(5,2)", "7")),
        ),
    ),
    Format(
        "lists and sets",
        BOXED,
        (
            ("1,2", ("2, 1", r"1 \text{ and } 2", r"x=1 \text{ or } x=2", r"\{1,2\}"), ("1", "12")),
            (r"\{-1,0,1\}", (r"-1, 0, 1", r"\{1,0,-1\}"), (r"\{-1,1\}", "(-1,1)", "0")),
            (r"\pm 3", (r"3, -3", r"x=\pm 3", r"-3 \text{ and } 3"), ("3", "-3", r"\pm 9")),
            (r"1\pm\sqrt{2}", (r"1+\sqrt2, 1-\sqrt2",), (r"1+\sqrt2", r"-1\pm\sqrt2", r"\pm 2")),
            (r"\emptyset", (r"\varnothing", r"\{\}"), (r"\{0\}", "0", r"\{\emptyset,1\}")),
            ("2, 3, 5, 7", ("7,5,3,2", r"\{2,3,5,7\}"), ("2,3,5", "2,3,5,9", "2357")),
        ),
    ),
    Format(
        "matrices and vectors",
        BOXED,
        (
            (
                r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
                (
                    r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
                    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
                    r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)",
                ),
                (
                    r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
                    r"\begin{pmatrix}1&2&3&4\end{pmatrix}",
                    r"\begin{pmatrix}1&2\\3&5\end{pmatrix}",
                ),
            ),
            (
                r"\begin{pmatrix}1/2\\-3\end{pmatrix}",
                (
                    r"\begin{pmatrix}0.5\\-3\end{pmatrix}",
                    r"\begin{bmatrix}\frac12\\-3\end{bmatrix}",
                ),
                (r"\begin{pmatrix}-3\\1/2\end{pmatrix}", r"\begin{pmatrix}2\\-3\end{pmatrix}"),
            ),
        ),
    ),
    Format(
        "units",
        BOXED,
        (
            (r"5\text{ cm}", ("5", "5 cm", r"5\,\text{cm}", r"5\mathrm{~cm}"), (r"5\text{ m}",)),
            (
                r"5\text{ m}^2",
                ("5 m^2", r"5\text{ m}^{2}", r"5\text{ square meters}", "5"),
                (r"5\text{ m}^3", r"25\text{ m}^2", r"5\text{ cm}^2"),
            ),
            ("12", (r"12\text{ inches}", r"12\text{ students}", "12 apples"), (r"1\text{ foot}",)),
            (r"60\text{ mph}", ("60", r"60\text{ miles per hour}"), (r"60\text{ km/h}", "6")),
            (r"90^\circ", ("90", r"90^{\circ}", "90°", r"90\text{ degrees}"), ("9", r"100^\circ")),
            (r"\$3.50", ("3.5", r"\$3.50", r"3.50\text{ dollars}"), (r"\$35", "3.05", r"\$3")),
        ),
    ),
    Format(
        "percents",
        BOXED,
        (
            (r"25\%", (r"25\%", "25", r"\frac14", "0.25", r"25\text{ percent}"), ("0.025",)),
            ("0.08", (r"8\%", "0.08", "2/25"), (r"0.08\%", "0.8", r"80\%")),
            (r"150\%", ("150", "1.5", r"150\%"), (r"15\%", "0.15", r"50\%")),
        ),
    ),
    Format(
        "text",
        BOXED,
        (
            (r"\text{even}", ("even", r"\text{Even}", r"\textbf{even}"), ("odd",)),
            (r"\text{Yes}", ("yes", r"\text{yes}", "Yes."), ("no", r"\text{No}", "maybe")),
            (r"\text{Evelyn}", ("Evelyn", r"\text{ Evelyn }"), (r"\text{Briana}", "E")),
            (r"\text{east}", ("east", r"\mathrm{east}"), ("west", r"\text{north east}")),
            (r"\text{no solution}", (r"\text{No solution}",), ("0", r"\text{one solution}")),
        ),
    ),
    Format(
        "equations and functions",
        BOXED,
        (
            ("y=2x+3", ("y = 3 + 2x", "2x-y+3=0", "y-2x=3"), ("y=2x-3", "y=3x+2", "2x+3y=0")),
            ("x^2+y^2=25", ("y^2+x^2=25", "x^2+y^2-25=0"), ("x^2+y^2=5", "x^2-y^2=25", "x=25")),
            ("xy=1", (r"y=\frac1x", "yx=1", r"x=\frac{1}{y}"), ("x+y=1", "y=x", "xy=2")),
            ("x^2+1=0", ("x^2=-1", "1+x^2=0"), ("1=0", "x^2+2=0", "x^2=1")),
            ("f(x)=x^2", ("x^2", r"f(x)=x\cdot x"), ("f(x)=2x", "x", "f(x)=x^3")),
            ("x=4", ("4", "x=4", "4=x"), ("x=5", "y=4", "x=-4")),
        ),
    ),
    Format(
        "polynomials and expressions",
        BOXED,
        (
            ("x^2-1", ("(x-1)(x+1)", "-1+x^2"), ("x^2+1", "(x-1)^2", "x^2")),
            ("(x+2)(x-3)", ("(x-3)(x+2)", "x^2-x-6"), ("(x-2)(x+3)", "x^2-6")),
            (r"\frac{1}{2}x", (r"\frac{x}{2}", "0.5x"), (r"\frac{1}{2x}", "2x", r"\frac{2}{x}")),
            ("1/2 x", (r"\frac12 x", r"\frac{x}{2}"), ("1/(2x)", r"\frac{1}{2x}")),
            (r"\frac{x}{x+1}", (r"1-\frac{1}{x+1}", "x/(x+1)"), (r"\frac{x+1}{x}", "x/x+1")),
            (r"n(n+1)/2", (r"\frac{n^2+n}{2}", r"\frac{n(n+1)}{2}"), ("n(n+1)", "n^2/2")),
            (r"e^{2x}", (r"(e^x)^2", r"e^{x}\cdot e^{x}"), (r"e^{x^2}", "2e^x", "e^2x")),
            (r"\ln 2", (r"\ln(2)", r"\log_e 2"), ("2", r"\ln 3", r"e^2", r"\frac{1}{\ln 2}")),
            ("3+4i", ("4i+3", r"3+4\mathrm{i}"), ("3-4i", "4+3i", "7", "7i")),
            (r"\frac{1}{x^2}", ("x^{-2}", r"\left(\frac1x\right)^2"), ("x^2", r"\frac{1}{x}")),
            (r"10^{-2}x", (r"\frac{x}{100}", "0.01x"), ("100x", "-100x", "10-2x")),
        ),
    ),
    Format(
        "identities",
        BOXED,
        (
            (r"\ln(x^2)", (r"2\ln x", r"\ln x^2"), (r"(\ln x)^2", r"\ln(2x)")),
            (r"\sqrt{xy}", (r"\sqrt{x}\sqrt{y}",), (r"\sqrt{x}+\sqrt{y}", "xy")),
            (r"\frac{\sin x}{1+\cos x}", (r"\tan\frac{x}{2}",), (r"\tan x", r"\frac{\sin x}{2}")),
            (r"\sqrt[3]{x^2}", ("x^{2/3}",), ("x^{3/2}", "x")),
            (r"\cos 2x", (r"\cos^4 x-\sin^4 x", r"1-2\sin^2 x"), (r"2\cos x", r"\sin 2x")),
            ("n(n-1)", (r"2\binom{n}{2}", "n^2-n"), ("n^2-1", r"\frac{n(n-1)}{2}")),
            (r"\frac{1}{x(x+1)}", (r"\frac1x-\frac{1}{x+1}",), (r"\frac1x+1", r"\frac{1}{x^2}")),
            (r"\sqrt{x+1}+\sqrt{x}", (r"\frac{1}{\sqrt{x+1}-\sqrt{x}}",), (r"\sqrt{2x+1}",)),
            ("2^{n+1}", (r"2\cdot 2^n",), ("2^n+1", "4^n", "n^2")),
            ("x", (r"e^{\ln x}", r"\frac{x^2}{x}"), (r"|x|", r"\sqrt{x^2}", r"x+10^{-9}x")),
        ),
    ),
    Format(
        "times and ratios",
        BOXED,
        (
            ("2:15", ("2:15",), ("4:30", "2.15", "15:2", "1:15")),
            (r"2:15\text{ p.m.}", (r"2:15\text{ p.m.}", r"2:15\text{ pm}"), (r"4:30\text{ p.m.}",)),
            ("3:4", ("3:4",), ("4:3", "34", "3:5")),
        ),
    ),
    Format(
        "numbers in a base",
        BOXED,
        (
            ("1011_2", ("1011_2", "1011_{2}", "1011"), ("1101_2", "1011_3", "111_2")),
            ("2A_{16}", ("2A_{16}", "2a_{16}"), ("A2_{16}", "2A_{12}")),
        ),
    ),
    Format(
        "Minerva: a sentence at the end",
        MINERVA,
        (
            (r"\frac{7}{9}", (r"\frac{7}{9}", "7/9", r"\dfrac{7}{9}"), (r"\frac{9}{7}", "0.7")),
            ("256", ("256", "2^8"), ("265", "2.56")),
            (r"\sqrt{51}", (r"\sqrt{51}", "51^{1/2}"), (r"\sqrt{15}", "51")),
            ("(1,4)", ("(1,4)", "(1, 4)"), ("(4,1)", "14")),
            (r"x^2+4x+4", ("(x+2)^2", "4+4x+x^2"), ("(x+4)^2", "x^2+4")),
        ),
    ),
)  # fmt: skip


LATER = (
    Format(
        "written after the reward was last changed",
        BOXED,
        (
            ("1,024", ("1024", "1,024", "2^{10}", "1024.0"), ("1.024", "1 024 1", "10.24", "1025")),
            ("3 1/4", ("13/4", r"3\frac14", "3.25"), ("31/4", "3/4", "3.4", "3, 1/4")),
            (r"-\frac{5}{6}", (r"\frac{5}{-6}", "-5/6", r"-\dfrac{10}{12}"), ("5/6", "-6/5")),
            (r"5\sqrt{2}", (r"\sqrt{50}", r"5\sqrt 2", r"\frac{10}{\sqrt2}"), (r"2\sqrt5", "7.07")),
            (r"\frac{2\pi}{3}", (r"2\pi/3", r"\tfrac23\pi"), (r"\frac{3}{2\pi}", "120", "2.09")),
            ("x^3-8", (r"(x-2)(x^2+2x+4)", "-8+x^3"), ("(x-2)^3", "x^3+8", "x^3-2")),
            (r"\frac{3}{4}y", (r"\frac{3y}{4}", "0.75y", "3y/4"), (r"\frac{3}{4y}", "4y/3")),
            ("2/3 n", (r"\frac{2n}{3}", r"\frac23 n"), (r"\frac{2}{3n}", "2/(3n)", "23n")),
            ("(-4,7]", (r"-4<x\le 7", r"(-4, 7]"), ("[-4,7)", "(-4,7)", "-4,7", r"x\le 7")),
            (r"[0,\infty)", (r"x\ge 0", r"\left[0,\infty\right)"), (r"(0,\infty)", r"x\le 0", "0")),
            ("(5,12,13)", ("(5, 12, 13)",), ("(13,12,5)", "(5,12)", "30")),
            (r"\{2,4,8\}", ("8,4,2", r"\{8, 2, 4\}"), ("(2,4,8,16)", "2,4", "248")),
            (r"\pm\sqrt{7}", (r"\sqrt7,-\sqrt7", r"-\sqrt{7}, \sqrt{7}"), (r"\sqrt7", r"\pm 7")),
            ("7:05", ("7:05", "07:05"), ("7:50", "14:10", "5:07", "7.05")),
            (r"11:40\text{ a.m.}", (r"11:40\text{ am}", "11:40 a.m."), ("11:40 p.m.", "1:40 a.m.")),
            ("5:8", ("5:8", r"5 : 8"), ("8:5", "58")),
            (r"40\%", (r"40\%", "0.4", "2/5", "40"), ("4", "0.04", r"0.4\%")),
            (r"12\text{ km}", ("12", "12 km", r"12\text{ kilometers}"), (r"12\text{ m}", "1.2")),
            (r"9\text{ cm}^3", ("9 cm^3", r"9\text{ cubic centimeters}"), (r"9\text{ cm}^2", "27")),
            (r"\$1,200", ("1200", r"\$1200.00", "1,200 dollars"), (r"\$12", r"\$1.2", "1,20")),
            ("14", ("14 people", r"14\text{ days}", "14"), ("14.5", "1 4", "13 people")),
            (r"45^\circ", ("45", r"45\text{ degrees}", "45°"), (r"54^\circ", "4.5", r"45\%")),
            (r"\text{odd}", ("odd", "Odd"), ("even", r"\text{odd or even}", "o")),
            (r"\text{Saturday}", ("saturday", r"\textbf{Saturday}"), ("Sunday", "Sat Sun", "6")),
            ("E", ("(E)", r"\text{(E)}", "E"), ("e=2", "F", "D or E", "(D)")),
            ("y=-x+4", ("x+y=4", "y=4-x", "2x+2y=8"), ("y=x+4", "y=-x", "x-y=4")),
            ("x^2=9", (r"x=\pm 3", "x^2-9=0"), ("x=3", "x^2=3", "x=9")),
            ("x^2+4=0", ("x^2=-4", "2x^2+8=0"), ("x^2+9=0", "0=1", "x=2")),
            ("ab=6", ("ba=6", "6=ab"), ("a+b=6", "ab=5", "a=6")),
            ("z=2-3i", ("2-3i", "-3i+2"), ("2+3i", "-1", "3-2i")),
            (r"\log_3 5", (r"\frac{\ln 5}{\ln 3}", r"\log_{3}(5)"), (r"\log_5 3", r"\frac53")),
            (r"\frac{e^2-1}{2}", (r"\frac12(e^2-1)", r"\frac{e^2}{2}-\frac12"), ("e^2/2",)),
            ("120_3", ("120_{3}", "120"), ("102_3", "120_4", "15_3")),
            ("6.02\\times 10^{23}", (r"6.02\cdot 10^{23}", "6.02e23"), ("6.02", "6e23")),
            (r"0.1\overline{6}", (r"\frac16", "0.1666667"), ("0.16", "0.17", r"\frac{16}{99}")),
            (
                r"\begin{pmatrix}0&-1\\1&0\end{pmatrix}",
                (r"\begin{bmatrix} 0 & -1 \\ 1 & 0 \end{bmatrix}",),
                (r"\begin{pmatrix}0&1\\-1&0\end{pmatrix}", r"\begin{pmatrix}0&-1&1&0\end{pmatrix}"),
            ),
        ),
    ),
)  # fmt: skip
"""Measured as they are, and the reward was not changed for them."""


def pairs(formats: tuple[Format, ...] = FORMATS) -> Iterator[Pair]:
    for name, responses, entries in formats:
        number = 0
        for gold, right, wrong in entries:
            for is_right, answers in ((True, right), (False, wrong)):
                for answer in answers:
                    yield Pair(name, gold, responses[number % len(responses)] % answer, is_right)
                    number += 1
