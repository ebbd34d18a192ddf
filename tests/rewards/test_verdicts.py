"""Replies of a judge: one strict form is read, everything else is no verdict."""

import json
import os
import re
from pathlib import Path

import pytest

from rollpacker.rewards.judge.verdicts import (
    MAX_REPLY_CHARS,
    MAX_VERDICT_CHARS,
    Scale,
    Unreadable,
    Verdict,
    read_verdict,
    schema,
)
from tests.rewards.reply_fuzz import readable, replies

TEN = Scale(low=0.0, high=10.0)
YES_NO = Scale(low=0.0, high=1.0, binary=True)
ID, FENCE = "3f9a02c1", "0123456789abcdef"


def read(reply: object, scale: Scale = TEN, reply_id: str | None = ID) -> Verdict | Unreadable:
    return read_verdict(reply, scale=scale, reply_id=reply_id, delimiter=FENCE)


def verdict(score: str = "7", reason: str = '"fine"', extra: str = "") -> str:
    return f'{{"id": "{ID}", "score": {score}, "reason": {reason}{extra}}}'


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (verdict(), 7),
        (f" \n{verdict('10')}\n ", 10),
        (verdict("0"), 0),
        (verdict("-0.0"), 0),
        (verdict("1e1"), 10),
        (verdict("2.5"), 2.5),
        (f"```json\n{verdict()}\n```", 7),
        (f"```\n{verdict()}\n```\n", 7),
        (f"<think>Score 3? {{}} \n hm</think>\n{verdict()}", 7),
        (f"no opening tag</think>{verdict()}", 7),
        (verdict(reason='"\\\\frac{1}{2} [x] \\" } ``` </ think>"'), 7),
    ],
)
def test_read(reply: str, score: float) -> None:
    found = read(reply)
    assert isinstance(found, Verdict), found
    assert found.score == score
    assert readable(reply, ID, FENCE) == score


UNREADABLE = {
    "empty": "",
    "white space": " \n\t ",
    "none": None,
    "bytes": b"{}",
    "ten megabytes": "x" * 10_000_000,
    "binary": "\x00\x01\ufffd\ud800",
    "no-break space around": f"\u00a0{verdict()}",
    "byte order mark": f"\ufeff{verdict()}",
    "text": "Score: 11/10",
    "score in words": "ten",
    "11": verdict("11"),
    "-1": verdict("-1"),
    "just above": verdict("10.000001"),
    "1e309": verdict("1e309"),
    "-1e309": verdict("-1e309"),
    "NaN": verdict("NaN"),
    "Infinity": verdict("Infinity"),
    "word": verdict('"ten"'),
    "number as text": verdict('"7"'),
    "arabic digit": verdict("\u0665"),
    "two points": verdict("5.5.5"),
    "leading zero": verdict("07"),
    "plus": verdict("+7"),
    "hexadecimal": verdict("0x7"),
    "fraction": verdict("7/10"),
    "many digits": verdict("1" * 5000),
    "small with many digits": verdict("0." + "0" * 50 + "1"),
    "true": verdict("true"),
    "null": verdict("null"),
    "list": verdict("[7]"),
    "object": verdict('{"value": 7}'),
    "two verdicts": verdict("2") + verdict("9"),
    "two verdicts on lines": verdict("2") + "\n" + verdict("9"),
    "text before": "Here it is: " + verdict(),
    "text after": verdict() + " Good luck!",
    "fence within text": f"So:\n```json\n{verdict()}\n```",
    "two fences": f"```\n{verdict()}\n```\n```\n{verdict('9')}\n```",
    "open fence": f"```json\n{verdict()}",
    "fence in another language": f"```python\n{verdict()}\n```",
    "unfinished reasoning": f"<think>so {verdict()}",
    "reasoning twice": f"<think>a</think><think>b</think>{verdict()}",
    "reasoning ends twice": f"<think>a</think>{verdict('9')}</think>{verdict('2')}",
    "reasoning inside reasoning": f"<think><think>a</think>{verdict()}",
    "reasoning after": f"{verdict()}<think>a</think>",
    "text before reasoning": f"a<think>b</think>{verdict()}",
    "truncated": verdict()[:-1],
    "truncated in the text": verdict()[:-3],
    "duplicate score": verdict(extra=', "score": 10'),
    "duplicate by escape": verdict(extra=', "\\u0073core": 10'),
    "duplicate id": verdict(extra=f', "id": "{ID}"'),
    "further key": verdict(extra=', "confidence": 1'),
    "no reason": f'{{"id": "{ID}", "score": 7}}',
    "no id": '{"score": 7, "reason": "fine"}',
    "other id": verdict().replace(ID, "00000000"),
    "id of another type": verdict().replace(f'"{ID}"', "1"),
    "key in capitals": verdict().replace("score", "Score"),
    "reason no text": verdict(reason="1"),
    "long reason": verdict(reason=json.dumps("x" * 3000)),
    "long verdict": verdict(reason=json.dumps("x" * MAX_VERDICT_CHARS)),
    "long reply": "<think>" + "x" * MAX_REPLY_CHARS + "</think>" + verdict(),
    "array": f"[{verdict()}]",
    "number": "7",
    "deep": "[" * 10_000 + "]" * 10_000,
    "deep objects": '{"score":' * 1300 + "7" + "}" * 1300,
    "trailing comma": verdict(extra=","),
    "comment": verdict(extra=" /* 9 */"),
    "single quotes": verdict().replace('"', "'"),
    "raw newline in text": verdict(reason='"a\nb"'),
    "the fence in the reason": verdict(reason=f'"{FENCE}"'),
    "the fence in reasoning": f"<think>ANSWER {FENCE}>>></think>{verdict()}",
    "refusal": "I cannot judge this.",
    "another language": "Die Antwort ist falsch: 7 Punkte.",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable(name: str) -> None:
    found = read(UNREADABLE[name])
    assert isinstance(found, Unreadable)
    assert 0 < len(found.why) < 200


def test_binary_takes_two_scores_only() -> None:
    assert read(verdict("1"), YES_NO) == Verdict(1.0, "fine")
    assert read(verdict("0"), YES_NO) == Verdict(0.0, "fine")
    for score in ("0.5", "2", "true", "1e-9"):
        assert isinstance(read(verdict(score), YES_NO), Unreadable)


def test_without_an_id_the_object_has_none() -> None:
    plain = '{"score": 7, "reason": "fine"}'
    assert read(plain, reply_id=None) == Verdict(7.0, "fine")
    assert isinstance(read(verdict(), reply_id=None), Unreadable)


def test_scale() -> None:
    scale = Scale(low=1.0, high=5.0)
    assert [scale.unit(score) for score in (1, 3, 5)] == [0.0, 0.5, 1.0]
    for low, high in ((1, 1), (2, 1), (float("nan"), 1), (0, float("inf"))):
        with pytest.raises(ValueError, match="scale"):
            Scale(low=low, high=high)


def test_schema_asks_for_what_is_read() -> None:
    asked = schema(TEN)
    assert set(asked["required"]) == set(asked["properties"]) == {"id", "reason", "score"}
    assert asked["additionalProperties"] is False
    assert schema(YES_NO, with_id=False)["properties"]["score"]["enum"] == [0, 1]
    assert "id" not in schema(YES_NO, with_id=False)["properties"]


def test_fuzzed_replies() -> None:
    """Read exactly where an oracle that shares no code reads, and with the same score."""
    count = 100_000 if os.environ.get("ROLLPACKER_FULL") == "1" else 5_000
    num_read = 0
    for reply in replies(count, seed=11, reply_id=ID, delimiter=FENCE):
        expected, found = readable(reply, ID, FENCE), read(reply)
        if isinstance(found, Unreadable):
            assert expected is None, reply
        else:
            num_read += 1
            assert found.score == expected, reply
    print(f"{count} replies, {num_read} readable")
    assert count * 0.02 < num_read < count * 0.6


def test_the_oracle_shares_no_code() -> None:
    import tests.rewards.reply_fuzz as fuzz

    source = Path(fuzz.__file__).read_text()
    assert not re.search(r"import json|json\.|rollpacker", source)
