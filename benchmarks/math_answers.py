"""What each layer above math-verify is worth: right and wrong answers, by arm and by set.

Sets: answers in public benchmarks' formats (`tests/rewards/math_formats.py`: those for which the
reward was repaired, and later ones), our own tests' pairs (`math_corpus.py`: ours must win there),
and fuzzed ones, which an oracle (`math_strings.py`) may know to be wrong. Arms: math-verify alone
in the same sandbox; the reward `math`; and the reward with math-verify in one layer's place. Every
answer has a run of its own.

    python benchmarks/math_answers.py            # some minutes
    python benchmarks/math_answers.py --quick    # a smoke test; writes nothing
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, NamedTuple

from lab import bench

from rollpacker.rewards.math.math_reward import PROFILE, MathConfig, MathReward
from rollpacker.rewards.reward import RewardConfig, RewardInput
from rollpacker.rewards.shared import Shared
from rollpacker.sandbox import Limits, Sandbox, Status, open_sandbox
from rollpacker.sandbox.sandbox import SandboxConfig
from tests.rewards.math_corpus import RIGHT, WRONG
from tests.rewards.math_formats import LATER, pairs
from tests.rewards.math_strings import fuzzed, may_be_right

LIMIT_S = 5.0
NUM_FUZZED = 200

MATH_VERIFY = r"""
import json, sys
from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig
from math_verify import parse, verify
request = json.loads(sys.stdin.buffer.read())
ways = [LatexExtractionConfig(), ExprExtractionConfig()]
if request["gold"].strip() in list("ABCDE"):
    ways.append(StringExtractionConfig(strings=tuple("ABCDE")))
gold = parse("$" + request["gold"] + "$", ways, parsing_timeout=None)
answer = parse(request["response"], ways, parsing_timeout=None)
print(json.dumps(verify(gold, answer, timeout_seconds=None, raise_on_error=True)))
"""
"""Time is limited from outside: its own timeouts need the main thread's signals."""

EXTRACT = """
import json, sys
from math_verify import parse
found = parse(sys.stdin.read(), parsing_timeout=None)
print(json.dumps(found[-1] if found and isinstance(found[-1], str) else None))
"""
"""The text that math-verify takes for the answer."""

OURS = """
import json, sys
from rollpacker.rewards.math.checker import check, expressions, structure, text
{changes}
request = json.loads(sys.stdin.buffer.read())
sys.setrecursionlimit(3000)
comparison = check.Comparison(form="evaluated", percent="lenient", min_digits=6)
print(json.dumps(check.judge(request["gold"], request["response"], comparison)))
"""

WITHOUT = {
    "text": """
check.clean = lambda text: text.strip()
check.number = lambda text: None
""",
    "structure": """
check.read = lambda text: structure.Value((text,), None, text)
check.take_unit = lambda text: (text, "")
check.same_words = check.same_based = lambda gold, answer: None
""",
    "expressions": """
from math_verify import parse, verify
def same(gold, answer):
    one, other = (parse("$" + text + "$", parsing_timeout=None) for text in (gold, answer))
    return verify(one, other, timeout_seconds=None, raise_on_error=True)
check.parse = lambda text: None
check.same_expression = lambda gold, gold_number, answer, answer_number, digits: same(gold, answer)
check.same_relation = same
""",
}


LAYERS = ("extract", *WITHOUT)
ARMS = ("math-verify alone", "ours", *(f"ours without {layer}" for layer in LAYERS))


class Case(NamedTuple):
    set_name: str
    gold: str
    response: str
    is_right: bool | None
    """None: not known to be right, if it is not wrong."""


def cases(num_fuzzed: int) -> list[Case]:
    found = [Case("formats", gold, text, right) for _, gold, text, right in pairs()]
    found += [Case("later formats", gold, text, right) for _, gold, text, right in pairs(LATER)]
    for right, corpus in ((True, RIGHT), (False, WRONG)):
        found += [
            Case("own corpus", gold, rf"So it is \boxed{{{answer}}}.", right)
            for gold, answer in corpus
        ]
    for gold, text in fuzzed(num_fuzzed, 0):
        found.append(Case("fuzzed", gold, text, None if may_be_right(gold, text) else False))
    return found


class Judges:
    """Every arm, in one sandbox."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        shared, entry = Shared(SandboxConfig()), RewardConfig(function="math")
        self.reward = MathReward(MathConfig(), entry=entry, name="math", shared=shared)
        self.trouble: dict[str, list[str]] = {}

    async def says(self, program: str, stdin: str) -> Any:
        """What the program prints, as JSON; a status if it did not come to that."""
        limits = Limits(wall_s=LIMIT_S, memory_bytes=512 << 20)
        result = await self.box.run(program, stdin=stdin, limits=limits, profile=PROFILE)
        if result.status is not Status.OK:
            return result.status
        return json.loads(result.stdout.decode().rstrip().rpartition("\n")[2])

    async def verdict(self, arm: str, case: Case) -> str:
        """right, wrong, or why there is none."""
        if arm == "math-verify alone":
            request = json.dumps({"gold": case.gold, "response": case.response})
            said = await self.says(MATH_VERIFY, request)
            return str(said) if isinstance(said, Status) else "right" if said else "wrong"
        response = case.response
        if arm == "ours without extract":
            found = await self.says(EXTRACT, response)
            if found is None or isinstance(found, Status):
                return "wrong" if found is None else str(found)
            response = rf"\boxed{{{found}}}"
        decided = self.reward.decide(as_input(case.gold, response))
        if not isinstance(decided, tuple):
            return "right" if getattr(decided, "value", 0.0) else "wrong"
        gold, answer = decided
        changes = WITHOUT.get(arm.removeprefix("ours without "), "")
        request = json.dumps({"gold": gold, "response": answer})
        said = await self.says(OURS.format(changes=changes), request)
        return str(said) if isinstance(said, Status) else str(said[0])


def as_input(gold: str, response: str) -> RewardInput:
    return RewardInput(
        prompt="?",
        completion=response,
        completion_tokens=(),
        finish_reason="stop",
        columns={"answer": gold},
    )


async def measure(found: list[Case], *, show: bool) -> dict[str, dict[str, dict[str, int]]]:
    counts: dict[tuple[str, str], Counter[str]] = {}
    async with open_sandbox("bwrap", workers=2) as box:
        judges = Judges(box)

        async def one(arm: str, case: Case) -> None:
            verdict = await judges.verdict(arm, case)
            kind = kind_of(verdict, case.is_right)
            counts.setdefault((arm, case.set_name), Counter())[kind] += 1
            if show and kind in ("right refused", "wrong accepted", "no verdict"):
                print(f"{arm}: {kind} ({verdict}): {case.gold!r} {case.response!r}")

        for arm in ARMS:
            for start in range(0, len(found), 50):
                await asyncio.gather(*(one(arm, case) for case in found[start : start + 50]))
            print(arm, {key[1]: dict(n) for key, n in counts.items() if key[0] == arm}, flush=True)
    return {
        arm: {name: dict(sorted(counts[arm, name].items())) for a, name in counts if a == arm}
        for arm in ARMS
    }


def kind_of(verdict: str, is_right: bool | None) -> str:
    if verdict not in ("right", "wrong"):
        return "no verdict"
    if is_right is None:
        return "not labelled"
    truth = "right" if is_right else "wrong"
    return f"{truth} {'accepted' if verdict == 'right' else 'refused'}"


def main(show: bool = False, quick: bool = False) -> dict[str, Any]:
    found = cases(NUM_FUZZED)[:: 20 if quick else 1]
    by_arm = asyncio.run(measure(found, show=show))
    sizes = Counter((case.set_name, case.is_right) for case in found)
    pairs_of = {
        name: {"right": sizes[name, True], "wrong": sizes[name, False], "other": sizes[name, None]}
        for name in ("formats", "later formats", "own corpus", "fuzzed")
    }
    return {"pairs": pairs_of, "arms": by_arm}


if __name__ == "__main__":
    bench(main)
