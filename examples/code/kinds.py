"""The kinds of small programming problems that `code_tasks` draws from.

`$name` in statement and body stands for a parameter: a number in a range (a tuple) or one of some
choices (a list). Arguments are drawn by their type, or from `ranges`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Choices = tuple[int, int] | list[Any]


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    takes: str
    """`xs: ints, k: int`; types are int, ints, str, strs, floats, grid (rows of equal length)."""
    gives: str
    """int, float, bool, str, ints, strs, or anything else, which makes no stdin task."""
    statement: str
    body: str
    params: Mapping[str, Choices] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


N = {"n": (0, 40)}
POSITIVE = {"n": (1, 400)}
K = {"k": (2, 9)}
ANY = {"k": (-9, 20)}
LETTER = {"c": list("aeiorstn")}

NUMBERS_AND_TEXTS = (
    Kind(
        "linear",
        "n: int",
        "int",
        "Multiply n by $a and add $b.",
        "return $a * n + $b",
        {"a": (2, 12), "b": (-9, 40)},
    ),
    Kind(
        "multiples",
        "n: int",
        "int",
        "Add up all multiples of $k from 1 to n.",
        "return sum(range($k, n + 1, $k))",
        K,
        N,
    ),
    Kind(
        "digit_sum",
        "n: int",
        "int",
        "Return the sum of the decimal digits of n, times $k.",
        "return $k * sum(map(int, str(n)))",
        {"k": (1, 9)},
        {"n": (0, 99999)},
    ),
    Kind(
        "base",
        "n: int",
        "str",
        'Write n in base $k (digits 0 to 8, no prefix). 0 is "0".',
        """
        digits = ""
        while n:
            n, digit = divmod(n, $k)
            digits = str(digit) + digits
        return digits or "0"
        """,
        {"k": (2, 9)},
        {"n": (0, 5000)},
    ),
    Kind(
        "collatz",
        "n: int",
        "int",
        "Count the steps from n to 1: an even number is halved, an odd one becomes 3n + "
        "1. Multiply the count by $k.",
        """
        steps = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        return steps * $k
        """,
        {"k": (1, 5)},
        POSITIVE,
    ),
    Kind(
        "fibonacci",
        "n: int",
        "int",
        "The sequence begins with $a and $b; each further number is the sum of the two "
        "before. Return number n, counted from 0.",
        """
        a, b = $a, $b
        for _ in range(n):
            a, b = b, a + b
        return a
        """,
        {"a": (0, 9), "b": (1, 9)},
        N,
    ),
    Kind(
        "primes",
        "n: int",
        "ints",
        "Return all primes up to n, in order, that leave no remainder $r when divided by 4.",
        """
        found = []
        for p in range(2, n + 1):
            if all(p % d for d in range(2, int(p**0.5) + 1)) and p % 4 != $r:
                found.append(p)
        return found
        """,
        {"r": [1, 3]},
        {"n": (0, 120)},
    ),
    Kind(
        "divisors",
        "n: int",
        "ints",
        "Return all divisors of n that are at least $k, in increasing order.",
        "return [d for d in range($k, n + 1) if n % d == 0]",
        {"k": (1, 6)},
        POSITIVE,
    ),
    Kind(
        "interest",
        "n: int",
        "float",
        "1.0 grows by $k percent a year. Return what it has become after n years.",
        "return (1 + $k / 100) ** n",
        {"k": (1, 15)},
        N,
    ),
    Kind(
        "celsius",
        "n: int",
        "float",
        "Convert n degrees Fahrenheit to Celsius and add $k.",
        "return (n - 32) * 5 / 9 + $k",
        {"k": (0, 9)},
    ),
    Kind(
        "is_multiple",
        "n: int",
        "bool",
        "Return True if n is a multiple of $a or of $b, else False.",
        "return n % $a == 0 or n % $b == 0",
        {"a": (2, 7), "b": (8, 13)},
        N,
    ),
    Kind(
        "brackets",
        "n: int",
        "int",
        "Count the ways to write n pairs of brackets, correctly nested, and multiply by $k.",
        """
        ways = [1]
        for i in range(n):
            ways.append(sum(ways[j] * ways[i - j] for j in range(i + 1)))
        return ways[n] * $k
        """,
        {"k": (1, 9)},
        {"n": (0, 15)},
    ),
    Kind(
        "coins",
        "n: int",
        "int",
        "Count the ways to pay n with coins of 1, $a and $b.",
        """
        ways = [1] + [0] * n
        for coin in (1, $a, $b):
            for i in range(coin, n + 1):
                ways[i] += ways[i - coin]
        return ways[n]
        """,
        {"a": (2, 5), "b": (6, 12)},
        {"n": (0, 90)},
    ),
    Kind(
        "stairs",
        "n: int",
        "int",
        "Count the ways to climb n stairs, 1 or $k at a time.",
        """
        ways = [1]
        for i in range(1, n + 1):
            ways.append(ways[i - 1] + (ways[i - $k] if i >= $k else 0))
        return ways[n]
        """,
        {"k": (2, 5)},
        N,
    ),
    Kind(
        "transpose",
        "grid: grid",
        "lists",
        "Swap rows and columns of grid and add $k to each number.",
        "return [[x + $k for x in column] for column in zip(*grid)]",
        {"k": (0, 9)},
    ),
    Kind(
        "row_sums",
        "grid: grid",
        "ints",
        "Return the sum of each row of grid, without its numbers greater than $k.",
        "return [sum(x for x in row if x <= $k) for row in grid]",
        {"k": (5, 40)},
    ),
    Kind(
        "border",
        "grid: grid",
        "int",
        "Add up the numbers in the first and last row of grid (if there is one row, "
        "once), times $k.",
        """
        rows = grid if len(grid) == 1 else [grid[0], grid[-1]]
        return $k * sum(map(sum, rows))
        """,
        {"k": (1, 9)},
    ),
    Kind(
        "power_mod",
        "n: int",
        "int",
        "Return $a to the power of n, modulo $m.",
        "return pow($a, n, $m)",
        {"a": (2, 12), "m": [7, 11, 13, 97, 101, 1009]},
        {"n": (0, 2000)},
    ),
    Kind(
        "big_power",
        "n: int",
        "int",
        "Return $a to the power of n, exactly.",
        "return $a**n",
        {"a": (2, 99)},
        {"n": (0, 60)},
    ),
    Kind(
        "count_letter",
        "s: str",
        "int",
        'Count how often "$c" occurs in s, in lower or upper case.',
        'return s.lower().count("$c")',
        LETTER,
    ),
    Kind(
        "drop_letter",
        "s: str",
        "str",
        'Remove every "$c" from s.',
        'return s.replace("$c", "")',
        LETTER,
    ),
    Kind(
        "caesar",
        "s: str",
        "str",
        "Shift each lower-case letter of s by $k places in the alphabet, from z on to a. "
        "Keep everything else.",
        """
        result = ""
        for c in s:
            if "a" <= c <= "z":
                c = chr((ord(c) - 97 + $k) % 26 + 97)
            result += c
        return result
        """,
        {"k": (1, 25)},
    ),
    Kind(
        "palindrome",
        "s: str",
        "bool",
        "Return True if s, without its first $k characters, reads the same backwards, else False.",
        """
        s = s[$k:]
        return s == s[::-1]
        """,
        {"k": (0, 4)},
    ),
    Kind(
        "reverse_words",
        "s: str",
        "str",
        "Reverse each word of s that has at least $k letters. Words are separated by "
        "single blanks.",
        'return " ".join(w[::-1] if len(w) >= $k else w for w in s.split(" "))',
        {"k": (1, 6)},
    ),
    Kind(
        "long_words",
        "s: str",
        "strs",
        "Return the words of s that are longer than $k letters, in order.",
        "return [w for w in s.split() if len(w) > $k]",
        {"k": (1, 6)},
    ),
    Kind(
        "initials",
        "s: str",
        "str",
        'Return the first letters of the words of s in upper case, joined by "$sep".',
        'return "$sep".join(w[0].upper() for w in s.split())',
        {"sep": [".", "-", "+", "_", "/"]},
    ),
    Kind(
        "run_lengths",
        "s: str",
        "pairs",
        "Return a list of (character, length) tuples, one for each stretch of equal "
        "characters in s that is at least $k long.",
        """
        from itertools import groupby
        runs = [(c, len(list(g))) for c, g in groupby(s)]
        return [run for run in runs if run[1] >= $k]
        """,
        {"k": (1, 2)},
    ),
    Kind(
        "letter_counts",
        "s: str",
        "dict",
        "Return a dict from each character of s to how often it occurs; leave out those "
        "that occur fewer than $k times.",
        "return {c: s.count(c) for c in s if s.count(c) >= $k}",
        {"k": (1, 3)},
    ),
    Kind(
        "length_index",
        "words: strs",
        "dict",
        "Return a dict from each length to the list of words of that length, in order. "
        "Ignore words shorter than $k.",
        """
        result = {}
        for word in words:
            if len(word) >= $k:
                result.setdefault(len(word), []).append(word)
        return result
        """,
        {"k": (0, 4)},
    ),
    Kind(
        "longest_word",
        "words: strs",
        "str",
        'Return the longest of the words that do not contain "$c", the first of equals; '
        '"" if there is none.',
        'return max((w for w in words if "$c" not in w), key=len, default="")',
        LETTER,
    ),
    Kind(
        "sort_words",
        "words: strs",
        "strs",
        "Sort the words by length, $order first, equal lengths alphabetically.",
        """
        sign = 1 if "$order" == "shortest" else -1
        return sorted(words, key=lambda w: (sign * len(w), w))
        """,
        {"order": ["shortest", "longest"]},
    ),
)
