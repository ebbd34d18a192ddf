"""The kinds of small programming problems about lists of numbers; see `code_task_kinds`."""

from __future__ import annotations

from examples.code.kinds import ANY, K, Kind

LISTS = (
    Kind(
        "sum_above",
        "xs: ints",
        "int",
        "Add up the numbers in xs that are greater than $k.",
        "return sum(x for x in xs if x > $k)",
        ANY,
    ),
    Kind(
        "count_below",
        "xs: ints",
        "int",
        "Count the numbers in xs that are less than $k.",
        "return sum(x < $k for x in xs)",
        ANY,
    ),
    Kind(
        "every_kth",
        "xs: ints",
        "ints",
        "Return every ${k}th element of xs, beginning with the first.",
        "return xs[::$k]",
        K,
    ),
    Kind(
        "rotate",
        "xs: ints",
        "ints",
        "Rotate xs to the left by $k places. An empty list stays empty.",
        """
        if not xs:
            return []
        k = $k % len(xs)
        return xs[k:] + xs[:k]
        """,
        K,
    ),
    Kind(
        "gcd_all",
        "xs: ints",
        "int",
        "Return the greatest common divisor of all numbers in xs and $k.",
        """
        from math import gcd
        result = $k
        for x in xs:
            result = gcd(result, x)
        return result
        """,
        {"k": [12, 30, 60, 84, 96, 180, 210, 360]},
    ),
    Kind(
        "clamp",
        "xs: ints",
        "ints",
        "Replace each number in xs by the nearest one from $a to $b.",
        "return [min(max(x, $a), $b) for x in xs]",
        {"a": (-9, 5), "b": (6, 30)},
    ),
    Kind(
        "differences",
        "xs: ints",
        "ints",
        "Return xs[i + $k] - xs[i] for every i for which both exist.",
        "return [b - a for a, b in zip(xs, xs[$k:])]",
        {"k": (1, 4)},
    ),
    Kind(
        "running",
        "xs: ints",
        "ints",
        "Return the running totals of xs, starting from $k (which is not in the result).",
        """
        total = $k
        result = []
        for x in xs:
            total += x
            result.append(total)
        return result
        """,
        ANY,
    ),
    Kind(
        "kth_largest",
        "xs: ints",
        "int",
        "Return the ${k}. largest number in xs (equal ones count each), or 0 if there are"
        " not so many.",
        "return sorted(xs, reverse=True)[$k - 1] if len(xs) >= $k else 0",
        {"k": (1, 6)},
    ),
    Kind(
        "distinct",
        "xs: ints",
        "ints",
        "Return the numbers in xs that occur at least $k times, each once, in order of "
        "their first occurrence.",
        """
        result = []
        for x in xs:
            if xs.count(x) >= $k and x not in result:
                result.append(x)
        return result
        """,
        {"k": (1, 3)},
    ),
    Kind(
        "window_max",
        "xs: ints",
        "ints",
        "Return the maximum of each stretch of $k neighbours in xs.",
        "return [max(xs[i : i + $k]) for i in range(len(xs) - $k + 1)]",
        {"k": (1, 5)},
    ),
    Kind(
        "pair_count",
        "xs: ints",
        "int",
        "Count the pairs i < j with xs[i] + xs[j] == $k.",
        "return sum(xs[i] + xs[j] == $k for j in range(len(xs)) for i in range(j))",
        ANY,
    ),
    Kind(
        "best_stretch",
        "xs: ints",
        "int",
        "Return the largest sum of a stretch of neighbours in xs; an empty stretch counts $k.",
        """
        best, here = $k, 0
        for x in xs:
            here = max(x, here + x)
            best = max(best, here)
        return best
        """,
        {"k": (0, 9)},
    ),
    Kind(
        "longest_run",
        "xs: ints",
        "int",
        "Return the length of the longest stretch of neighbours in xs that are all at least $k.",
        """
        best = run = 0
        for x in xs:
            run = run + 1 if x >= $k else 0
            best = max(best, run)
        return best
        """,
        ANY,
    ),
    Kind(
        "partition",
        "xs: ints",
        "ints",
        "Move the numbers in xs that are less than $k to the front. Otherwise keep the order.",
        "return [x for x in xs if x < $k] + [x for x in xs if x >= $k]",
        ANY,
    ),
    Kind(
        "chunks",
        "xs: ints",
        "lists",
        "Cut xs into lists of $k elements; the last may be shorter.",
        "return [xs[i : i + $k] for i in range(0, len(xs), $k)]",
        K,
    ),
    Kind(
        "min_max",
        "xs: ints",
        "tuple",
        "Return (smallest, largest) of the numbers in xs and $k as a tuple.",
        "return min([*xs, $k]), max([*xs, $k])",
        ANY,
    ),
    Kind(
        "common",
        "xs: ints, ys: ints",
        "set",
        "Return the set of the numbers that are in both xs and ys, each increased by $k.",
        "return {x + $k for x in set(xs) & set(ys)}",
        {"k": (0, 9)},
    ),
    Kind(
        "merge",
        "xs: ints, ys: ints",
        "ints",
        "Return the numbers of xs and ys in $order order, equal ones as often as they occur.",
        'return sorted(xs + ys, reverse="$order" == "decreasing")',
        {"order": ["increasing", "decreasing"]},
    ),
    Kind(
        "dot",
        "xs: ints, ys: ints",
        "int",
        "Multiply numbers at the same places in xs and ys, add the products up, and add "
        "$k. What is left of the longer list does not count.",
        "return sum(x * y for x, y in zip(xs, ys)) + $k",
        ANY,
    ),
    Kind(
        "mean",
        "xs: ints",
        "float",
        "Return the mean of the numbers in xs, plus $k; for an empty list $k.",
        "return (sum(xs) / len(xs) if xs else 0) + $k",
        ANY,
    ),
    Kind(
        "power_mean",
        "xs: ints",
        "float",
        "Return the square root of the mean of the squares of the numbers in xs and $k.",
        """
        values = [*xs, $k]
        return (sum(v * v for v in values) / len(values)) ** 0.5
        """,
        ANY,
    ),
    Kind(
        "scale",
        "xs: floats",
        "floats",
        "Divide each number in xs by $k.",
        "return [x / $k for x in xs]",
        K,
    ),
    Kind(
        "is_sorted",
        "xs: ints",
        "bool",
        "Return True if each number in xs is at most $k less than the one before it, else False.",
        "return all(a - b <= $k for a, b in zip(xs, xs[1:]))",
        {"k": (0, 20)},
    ),
    Kind(
        "matches",
        "xs: ints, k: int",
        "ints",
        "Return the places (from 0) in xs where the number leaves the same remainder as k"
        " when divided by $m.",
        "return [i for i, x in enumerate(xs) if x % $m == k % $m]",
        {"m": (2, 9)},
    ),
    Kind(
        "insert",
        "xs: ints, k: int",
        "int",
        "xs is in any order. Return how many of its numbers are less than k, plus $a for "
        "each that equals k.",
        "return sum(x < k for x in xs) + $a * xs.count(k)",
        {"a": (0, 9)},
    ),
)
