"""Drafts: guesses of a row's next tokens, copied from text that is there already.

With few rows live a decode step is mostly overhead, and a step that computes several tokens a row
costs little more than one that computes a single token. So each row is given a draft, the tokens at
all positions of the draft are drawn with the row's own noise (its random numbers), and they count
up to the first that differs from the draft, that one included. The drafts never change which tokens
come out, only how many steps it takes.

A draft is what follows the longest match of the row's newest tokens: in the row's own prompt and
response, in its running or finished siblings (the samples of the same prompt), or, at the same
place, in what an earlier launch (submission to an engine) of the sample generated. How many tokens
are drafted is decided by counts and constants, never by a clock: an abort takes effect at a decode
step, so a run must not depend on its timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollpacker.core.ids import PromptId
from rollpacker.engines.embedded.rows import Pending, RowTable

MAX_ROWS = 128
"""Most live rows in an engine for drafts to be looked up and tried there."""
LONGEST_MATCH = 32
SHORTEST_MATCH = 2
"""Fewest equal tokens that count as a match. The token that follows a single equal one is the right
draft in one case of three."""
LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
"""Numbers of tokens that a draft of one row may have."""
MAX_KEPT_TOKENS = 1 << 20
"""Most tokens of ended responses kept for drafts. Those of the oldest prompts go first."""
STEP_COST = (0.06, 2.3, 0.02, 0.035)
"""Costs (a, b, c, d) of a step on a CPU, in units of the overhead of a step without drafts: over r
rows that costs 1 + a r, and a step that computes t tokens for each row costs b + c r + d r t. Set
by hand after timings of single steps; c is a guess. `benchmarks/drafts.py` shows the effect."""
LOOK_COST = (0.15, 0.05)
"""Costs (a, b) of a look for drafts, in units of the overhead of a step without drafts: looking at
r rows costs a + b r."""
LOOK_SHARE = 0.01
"""Largest share of the time that may go into looks for drafts which find nothing."""
LOOK_ROWS = 8
"""Number of rows for which drafts are looked up first when the last step had none. If these promise
nothing, the other rows are not looked at."""
MIN_GAIN = 1.15
"""Least tokens per second that drafts must promise to be tried, as a multiple of those without."""
MIN_BALANCE = 0.98
"""Least tokens per second that drafting must have given lately, as a multiple of what steps
without drafts give. Below that, drafting pauses."""
BALANCE_STEPS = 32
"""Number of steps after which older steps count half in the balance that `MIN_BALANCE` bounds."""
PAUSE_STEPS = 64
RECENT_TOKENS = 128
"""Number of drafted tokens after which older ones count half in `Acceptance`."""

OWN, RUNNING, FINISHED, EARLIER, RESUMED = range(5)
KINDS = ("own", "running", "finished", "earlier", "resumed")
"""Names of the texts that a draft may be copied from: the row's own prompt and response, a running
or a finished sibling's response, or what the same sample generated before it was aborted. "resumed"
is the text that the last draft was copied from, continued after the token that was wrong."""
_PRIOR = (0.3, 0.5, 0.5, 0.7, 0.85, 0.9)
"""Chance that a drafted token is right before anything was drafted, by the class (`_SIZE_CLASS`) of
the match that the draft follows: somewhat below what `benchmarks/drafts.py` finds."""
_PRIOR_TOKENS = 8.0
"""Weight of `_PRIOR` against what is counted, as a number of drafted tokens."""
NOTES_PER_LOOK = 8
"""Number of drafts after which `Acceptance.expected_tokens` is computed from the counts anew."""
_SIZE_CLASS = (0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5)
"""Class of a match, by its number of equal tokens. Longer matches are of the last class."""
_SEPARATOR = chr(0x10FFFF)


@dataclass(slots=True, eq=False)
class Text:
    """Tokens as a string, one character a token. Python's string search needs no index, and on
    texts of up to 100,000 tokens it is faster than an index would be."""

    text: str


@dataclass(slots=True, eq=False)
class RowText(Text):
    """Prompt and response of a live row, and the place in a text where its next draft begins."""

    group: PromptId
    num_seen: int
    """Number of response tokens that are in `text`."""
    redraw: int
    """Which set of random numbers the row's tokens are drawn with: 0, or how often tokens were
    drawn again. When it changes, the row has lost tokens (`Extender.draw_again`)."""
    earlier: Text | None = None
    source: Text | None = None
    place: int = 0
    """Index of the draft's first token in the text that the draft is copied from (`source`)."""
    kind: int = OWN
    matched: int = 0
    """Number of tokens before `place` in the source text that equal the row's newest tokens."""

    @property
    def size_class(self) -> int:
        return _size_class(self.matched)

    def go_on(self, new: str) -> None:
        """Append the row's `new` tokens to its text, and skip as many in the source text, where its
        next draft begins. If the two differ, only tokens after the last difference match."""
        self.text += new
        self.num_seen += len(new)
        if self.source is None:
            return
        followed = self.source.text[self.place : self.place + len(new)]
        self.place += len(new)
        if followed == new:
            self.matched += len(new)
        else:
            pairs = zip(reversed(followed), reversed(new), strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
            self.kind, self.matched = RESUMED, same if len(followed) == len(new) else 0

    def ahead(self, num_tokens: int) -> str:
        """Return up to `num_tokens` next tokens of the text that the row's draft is copied from. If
        that is the row's own text and it ends before, its end is repeated."""
        if self.source is None:
            return ""
        part = self.source.text[self.place : self.place + num_tokens]
        if self.source is self and part:
            return (part * num_tokens)[:num_tokens]
        return part.partition(_SEPARATOR)[0]


@dataclass(slots=True, eq=False)
class EndedText(Text):
    """The ended responses to one prompt, joined into one text."""

    unread: list[np.ndarray]
    num_tokens: int = 0

    def add(self, tokens: np.ndarray) -> None:
        """Add a response that has ended. Only `read` appends it to `text`, since for most prompts
        no more drafts are looked for."""
        self.unread.append(tokens)
        self.num_tokens += len(tokens)

    def read(self) -> None:
        """Append to `text` the responses that were added since the last call."""
        for tokens in self.unread:
            self.text += _text(tokens) + _SEPARATOR
        self.unread.clear()


@dataclass(slots=True)
class Acceptance:
    """Counts of drafted tokens and of the right ones among them, by kind of text and class of match
    length. Older drafts weigh less."""

    right: np.ndarray = field(
        default_factory=lambda: np.tile(np.array(_PRIOR) * _PRIOR_TOKENS, (len(KINDS), 1))
    )
    tried: np.ndarray = field(
        default_factory=lambda: np.full((len(KINDS), len(_PRIOR)), _PRIOR_TOKENS)
    )
    _expected: np.ndarray | None = None
    _num_notes: int = 0

    def note(self, kind: int, size: int, num_drafted: int, num_right: int) -> None:
        """Count one tried draft of `num_drafted` tokens, of which the first `num_right` were right.
        `kind`: index in `KINDS`. `size`: class of its match's length."""
        self.right[kind, size] += num_right
        self.tried[kind, size] += num_right + (num_right < num_drafted)
        if self.tried[kind, size] > RECENT_TOKENS:
            self.right[kind, size] /= 2
            self.tried[kind, size] /= 2
        self._num_notes += 1
        if self._num_notes % NOTES_PER_LOOK == 0:
            self._expected = None

    def expected_tokens(self) -> np.ndarray:
        """Expected number of tokens that a step gives a row with a draft of k tokens: [kinds of
        text, classes of match, k = 0 ... longest draft]."""
        if self._expected is None:
            chance = np.minimum(self.right / self.tried, 0.995)[:, :, None]
            self._expected = (1 - chance ** np.arange(1, LENGTHS[-1] + 2)) / (1 - chance)
        return self._expected


@dataclass(slots=True)
class Pacing:
    """Decides at which steps to look for drafts. Looks that find nothing may take a bounded share
    of the time, and there are none for a while after drafts did not pay."""

    row_cost: float
    """Cost of a row in a step without drafts, as a multiple of the step's fixed overhead."""
    is_on: bool = False
    """Whether the last step was made with drafts."""
    credit: float = 0.0
    pause: int = 0
    num_tokens: float = 0.0
    plain_tokens: float = 0.0
    """Tokens that steps without drafts would have given in the time of those with drafts."""
    num_steps: int = 0

    def looks(self, num_rows: int) -> bool:
        """Return whether to look for drafts for the coming step over `num_rows` live rows. To be
        called once for every step, as each step earns time for looks or shortens a pause."""
        if self.pause:
            self.pause -= 1
            return False
        if self.is_on:
            return True
        fixed, per_row = LOOK_COST
        cost = fixed + per_row * min(num_rows, LOOK_ROWS)
        self.credit += LOOK_SHARE * (1 + self.row_cost * num_rows)
        if self.credit < cost:
            return False
        self.credit = 0.0
        return True

    def took_step(self, num_tokens: int, plain_tokens: float) -> None:
        """Note a step with drafts that gave `num_tokens`, where plain steps would have given
        `plain_tokens` in the same time."""
        self.is_on = True
        self.num_tokens += num_tokens
        self.plain_tokens += plain_tokens
        self.num_steps += 1
        if self.num_steps < BALANCE_STEPS:
            return
        if self.num_tokens < MIN_BALANCE * self.plain_tokens:
            self.pause, self.is_on = PAUSE_STEPS, False
        self.num_tokens, self.plain_tokens = self.num_tokens / 2, self.plain_tokens / 2
        self.num_steps //= 2


class Drafter:
    """Makes drafts for the live rows of one engine. A row's text is kept under the number of its
    submission (`Pending.sequence`), since rows change places."""

    def __init__(self, max_tokens: int) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        """Number of tokens that drafted steps gave beyond one token a row."""
        self._lengths = np.array([length for length in LENGTHS if length <= max_tokens])
        self._costs = _step_costs(self._lengths)
        self._proposed: list[tuple[int, int, int]] = []
        """Kind, class of match length and number of tokens of each draft that is being tried."""
        self.forget()

    # -- what it knows -----------------------------------------------------------------------------

    def keep(self, rows: RowTable, gone: Sequence[int]) -> None:
        """Keep the responses of these rows, which leave the engine, as a source of drafts for other
        samples of the same prompt."""
        for row in gone:
            entry = rows.pending[row]
            self._rows.pop(entry.sequence, None)
            tokens = rows.token_array(row)
            self._ended.setdefault(entry.request.sample.prompt, EndedText("", [])).add(tokens)
            self._num_kept += len(tokens)
        while self._num_kept > MAX_KEPT_TOKENS:
            oldest = next(iter(self._ended))
            self._num_kept -= self._ended.pop(oldest).num_tokens

    def forget(self) -> None:
        """Forget all texts and all counts. Called when the engine is idle, so that a resumed run,
        which starts without them, does the same as one that was never interrupted."""
        self.acceptance = Acceptance()
        self._pacing = Pacing(row_cost=STEP_COST[0])
        self._rows: dict[int, RowText] = {}
        self._ended: dict[PromptId, EndedText] = {}
        self._num_kept = 0

    def _read(self, rows: RowTable, which: Sequence[int]) -> list[RowText]:
        """Return the texts of these rows, brought up to date with their newest tokens."""
        counts, redraws = rows.host_column("count"), rows.host_column("redraw")
        texts = []
        for row in which:
            entry, count, redraw = rows.pending[row], int(counts[row]), int(redraws[row])
            known = self._rows.get(entry.sequence)
            if known is None or known.redraw != redraw or known.num_seen > count:
                known = self._rows[entry.sequence] = _row_text(entry, rows.tokens(row), redraw)
            elif count > known.num_seen:
                known.go_on(_text(rows.tokens(row, known.num_seen)))
            texts.append(known)
        return texts

    # -- drafts ------------------------------------------------------------------------------------

    def propose(self, rows: RowTable) -> list[list[int]] | None:
        """Return for every live row the tokens that may come next (its draft, possibly empty).
        None: a step without drafts is better."""
        num_rows = rows.num_rows
        if num_rows > MAX_ROWS or not self._pacing.looks(num_rows):
            return None
        if not self._pacing.is_on and num_rows > LOOK_ROWS:
            some = range(0, num_rows, -(-num_rows // LOOK_ROWS))
            if self._best_length(rows, some, num_rows)[0] == 0:
                return None
        length, texts, ahead = self._best_length(rows, range(num_rows), num_rows)
        if length == 0:
            self._pacing.is_on = False
            return None
        drafts = [[ord(one) for one in part[:length]] for part in ahead]
        self._proposed = [
            (text.kind, text.size_class, len(draft))
            for text, draft in zip(texts, drafts, strict=True)
        ]
        return drafts

    def _best_length(
        self, rows: RowTable, which: Sequence[int], num_rows: int
    ) -> tuple[int, list[RowText], list[str]]:
        """Return the number of tokens to draft for each row (0 if a plain step is better), and for
        the rows `which` their texts and the tokens that may follow. The number is chosen as if all
        `num_rows` live rows were like these."""
        texts = self._read(rows, which)
        expected = self.acceptance.expected_tokens()
        groups: dict[PromptId, list[RowText]] = {}
        for text in texts:
            groups.setdefault(text.group, []).append(text)
        for text in texts:
            if text.source is None or text.kind == RESUMED:
                self._point(text, groups[text.group], expected[:, :, 1])
        room = (rows.host_column("limit") - rows.host_column("count") - 1)[list(which)].tolist()
        longest = int(self._lengths[-1])
        ahead = [text.ahead(min(longest, most)) for text, most in zip(texts, room, strict=True)]
        gains = (
            expected[
                np.array([text.kind for text in texts])[:, None],
                np.array([text.size_class for text in texts])[:, None],
                np.minimum(np.array([len(part) for part in ahead])[:, None], self._lengths),
            ].mean(axis=0)
            / self._costs[num_rows]
        )
        best = int(gains.argmax())
        return (int(self._lengths[best]) if gains[best] >= MIN_GAIN else 0), texts, ahead

    def judge(self, num_new: np.ndarray) -> None:
        """Count which drafts of the last `propose` were right, now that their step has given each
        live row `num_new` tokens [rows]."""
        for (kind, size, num_drafted), new in zip(self._proposed, num_new.tolist(), strict=True):
            if num_drafted:
                self.acceptance.note(kind, size, num_drafted, new - 1)
            self.num_drafted += num_drafted
        num_tokens, num_rows = int(num_new.sum()), len(num_new)
        self.num_accepted += num_tokens - num_rows
        longest = max(num_drafted for _, _, num_drafted in self._proposed)
        place = int(np.searchsorted(self._lengths, longest))
        self._pacing.took_step(num_tokens, num_rows * float(self._costs[num_rows, place]))

    def _point(self, text: RowText, siblings: Sequence[RowText], chance: np.ndarray) -> None:
        """Set the source of a row's draft to the longest match, unless its present source is
        likelier to be right. `siblings`: texts of the prompt's live rows. `chance` [kind of text,
        class of match]: expected tokens of a step with a draft of one token."""
        kept = text.source
        found = self._longest_match(text, siblings)
        if found is None:
            return
        kind, source, place, matched = found
        is_better = chance[kind, _size_class(matched)] >= chance[RESUMED, text.size_class]
        if kept is None or is_better or not text.ahead(1):
            text.kind, text.source, text.place, text.matched = kind, source, place, matched

    def _longest_match(
        self, text: RowText, siblings: Sequence[RowText]
    ) -> tuple[int, Text, int, int] | None:
        """Find the longest match of the row's newest tokens: (kind, source, place after the match,
        number of tokens matched). Among equally long matches the one in the row's own text wins.
        None: there is no match."""
        best, found = SHORTEST_MATCH - 1, None
        most = min(LONGEST_MATCH, len(text.text))
        for kind, source in self._sources(text, siblings):
            within = source.text
            end = len(within) - 1  # Something must follow.
            low, high = best + 1, most
            at = within.rfind(text.text[-low:], 0, end) if low <= high else -1
            if at < 0:
                continue
            # What ends in a longer match ends in every shorter one.
            while low < high:
                middle = (low + high + 1) // 2
                further = within.rfind(text.text[-middle:], 0, end)
                if further < 0:
                    high = middle - 1
                else:
                    low, at = middle, further
            best, found = low, (kind, source, at + low, low)
        return found

    def _sources(self, text: RowText, siblings: Sequence[RowText]) -> Iterator[tuple[int, Text]]:
        yield OWN, text
        for sibling in siblings:
            if sibling is not text:
                yield RUNNING, sibling
        ended = self._ended.get(text.group)
        if ended is not None:
            ended.read()
            yield FINISHED, ended
        if text.earlier is not None:
            yield EARLIER, text.earlier


def _size_class(matched: int) -> int:
    return _SIZE_CLASS[min(matched, len(_SIZE_CLASS) - 1)]


def _text(tokens: Sequence[int] | np.ndarray) -> str:
    if len(tokens) < 64 and not isinstance(tokens, np.ndarray):
        return "".join(map(chr, tokens))
    return np.array(tokens, "<u4").tobytes().decode("utf-32-le", "surrogatepass")


def _row_text(entry: Pending, tokens: Sequence[int], redraw: int) -> RowText:
    """Make the text of a row that has none yet, from its response's `tokens` so far. If the sample
    had more tokens before it was aborted, the row's draft is copied from them."""
    request = entry.request
    text = RowText(
        text=_text(request.prompt_tokens) + _text(tokens),
        group=request.sample.prompt,
        num_seen=len(tokens),
        redraw=redraw,
    )
    if request.carried is not None and len(request.carried.tokens) > len(tokens):
        text.earlier = text.source = Text(_text(request.carried.tokens))
        text.place, text.kind = len(tokens), RESUMED
    return text


def _step_costs(lengths: np.ndarray) -> np.ndarray:
    """Cost of a drafted step as a multiple of a plain step's: [number of live rows, index in
    `lengths`]. `lengths`: numbers of tokens that a row's draft may have."""
    plain, overhead, per_row, per_token = STEP_COST
    rows = np.arange(MAX_ROWS + 1)[:, None]
    costs: np.ndarray = overhead + per_row * rows + per_token * rows * (1 + lengths)
    costs /= 1 + plain * rows
    costs[:, 0] = 1.0
    return costs
