"""Made-up dialogues: a sampler that draws anything, an environment that says anything."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.rewrites import find_rewrites, first_change
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.dialogue.trajectory import Segment, Trajectory
from rollpacker.spans import outside
from rollpacker.trainer.rows import rows_of
from rollpacker.trainer.trainer import TrainSample
from tests.dialogue.families import FAMILIES, TOOLS, template_of, tokenizer_of

WORDS = (
    *("the", "tool", "returned", "a", "result", "12", "345", "na\u00efve", "\u4f60\u597d"),
    *("\U0001f642", "question?", "x=1;", "{}", '"quoted"', "two\nlines", "\u0437\u0434", "e\u0301"),
)
Message = dict[str, Any]


@dataclass
class Scene:
    """A family's template, with tools or without."""

    name: str
    template: DialogueTemplate
    parser: TemplateDialogue
    rewrites: bool

    @classmethod
    def of(cls, name: str, *, tools: bool) -> Scene:
        template = template_of(name, TOOLS if tools else ())
        rewrites = find_rewrites(template) is not None
        return cls(name, template, TemplateDialogue(template), rewrites)


@dataclass
class Played:
    """A dialogue that was played, and what an engine saw of it."""

    trajectory: Trajectory
    seen: list[tuple[int, bool, float]]
    """Behind the prompt, in order: token, whether it was drawn, its log-prob."""
    messages: list[Message]
    """As they would be rendered, if every turn was one that the template could have written."""
    is_whole: bool = True
    """Every turn was the text of a message, ended by its token."""
    is_canonical: bool = True
    """... and drawn as the tokens that the whole rendering has."""
    splits: bool = False
    """Turns may be drawn as other tokens than the canonical ones of their text."""
    is_hostile: bool = False
    """Somebody's words spell markers."""
    faults: list[str] = field(default_factory=list)
    turns: list[tuple[tuple[int, ...], list[int], list[float]]] = field(default_factory=list)
    """Of each turn its whole prompt, the tokens drawn and their log-probs, where each has a prompt
    that is rendered anew."""


def play(rng: random.Random, scene: Scene, *, anew: bool = False) -> Played:
    """One dialogue of one to five turns; what is wrong with it is told in `faults`. `anew`: the
    prompt of each turn is the rendering of all messages before it."""
    family = FAMILIES[scene.name]
    played = Played(Trajectory(()), [], [], splits=rng.random() < 0.5)
    if family.system and rng.random() < 0.5:
        played.messages.append({"role": "system", "content": words(rng)})
    played.messages.append(told(rng, scene, played, "user"))
    played.trajectory = Trajectory(scene.template.prompt(played.messages))
    check_markers(scene, played.trajectory.prompt, played.messages, None, played)
    for number in range(1, rng.randint(1, 5) + 1):
        turn, sampled = draw(rng, scene, played, number)
        answers = answer(rng, scene, played, turn)
        sampled = ended(rng, scene, played, sampled, answers)
        log_probs = [-rng.random() for _ in sampled]
        given = scene.template.appended(answers, sampled)
        check_markers(scene, given, answers, sampled, played)
        message = scene.parser.message(sampled, number)
        played.turns.append((played.trajectory.context, sampled, log_probs))
        if turn is not None and sampled[-1] in scene.template.end_tokens:
            check_message(turn, message, played)
        played.seen += [(t, True, lp) for t, lp in zip(sampled, log_probs, strict=True)]
        played.seen += [(t, False, 0.0) for t in given]
        played.trajectory = played.trajectory.and_then(Segment(tuple(sampled), tuple(log_probs)))
        if anew:
            played.messages += [message, *answers]
            prompt_anew(scene, played, given)
        else:
            played.messages += [turn or message, *answers]
            played.trajectory = played.trajectory.and_then(Segment(given))
    if anew:
        check_rows(scene, played)
    else:
        check_whole(scene, played)
    return played


def prompt_anew(scene: Scene, played: Played, given: tuple[int, ...]) -> None:
    template = scene.template
    prompt = template.prompt(played.messages)
    played.trajectory = played.trajectory.prompted(prompt, given)
    if played.trajectory.context != prompt:
        played.faults.append("the next turn does not stand behind the whole rendering")
    text = template.render(played.messages, to_go_on=True)
    if not played.is_hostile and list(prompt) != plain_ids(template, text):
        played.faults.append("the prompt is not what the template writes")


def words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))


def told(rng: random.Random, scene: Scene, played: Played, role: str, **more: Any) -> Message:
    """Somebody's words, which may be empty, or spell markers."""
    text = words(rng) if rng.random() < 0.9 else ""
    if rng.random() < 0.05:
        played.is_hostile = True
        families = [FAMILIES[scene.name]] if rng.random() < 0.5 else list(FAMILIES.values())
        markers = [m for one in families for m in (*one.special, *one.plain, one.end)]
        spelt = [rng.choice(markers) for _ in range(3)]
        text = f"{text} {spelt[0]}{spelt[1]} {words(rng)}{spelt[2]}"
    return {"role": role, "content": text, **more}


def draw(
    rng: random.Random, scene: Scene, played: Played, number: int
) -> tuple[Message | None, list[int]]:
    """A turn without its end: a message's tokens, in half of the dialogues split where they need
    not be; or any tokens."""
    template, family = scene.template, FAMILIES[scene.name]
    ends = template.end_tokens
    if rng.random() < 0.05:
        played.is_whole = played.is_canonical = False
        vocabulary = [i for i in range(len(template.tokenizer)) if i not in ends]
        return None, rng.choices(vocabulary, k=rng.randint(1, 30))
    turn: Message = {"role": "assistant", "content": words(rng)}
    if "reasoning_content" in str(template.tokenizer.chat_template):
        turn["reasoning_content"] = words(rng)
    if template.tools and rng.random() < 0.5:
        turn["tool_calls"] = [
            {
                "id": f"call{number:03d}{place:02d}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for place in range(rng.randint(1, 3) if family.parallel else 1)
            for name, arguments in (call(rng),)
        ]
        if rng.random() < 0.5 or not family.parallel:
            turn["content"] = ""
    text = template.turn_text([{"role": "user", "content": "question"}, turn])
    assert text is not None
    sampled = list(template.canonical(text))
    if played.is_canonical:
        # A marker parts what is before it from what is behind, for every tokenizer.
        before = decoded(template, since_marker(template, played.trajectory))
        start = len(plain_ids(template, before))
        whole = plain_ids(template, before + text)
        if whole[:start] == plain_ids(template, before):
            sampled = whole[start:]
        else:  # the first token of the turn joins the last of the prompt
            played.is_canonical = False
    if played.splits:
        split = [piece for token in sampled for piece in pieces(rng, scene.name, token)]
        played.is_canonical &= split == sampled
        sampled = split
    return turn, sampled


def since_marker(template: DialogueTemplate, trajectory: Trajectory) -> list[int]:
    tokens = trajectory.segments[-1].tokens if trajectory.segments else trajectory.prompt
    last = [at for at, token in enumerate(tokens) if token in template.marker_ids]
    return list(tokens[last[-1] if last else 0 :])


def call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.3:
        return "clock", {"zones": [words(rng).split(" "), {"deep": [1, None, True]}]}
    arguments: dict[str, Any] = {"query": words(rng).strip()}
    if rng.random() < 0.5:
        arguments["limit"] = rng.randint(-5, 10**12)
    return "search", arguments


def pieces(rng: random.Random, name: str, token: int) -> list[int]:
    """The token, or others that make up the same text."""
    tokenizer = tokenizer_of(name)
    text = tokenizer.convert_ids_to_tokens(token)
    if len(text) < 2 or token in tokenizer.added_tokens_decoder or text.startswith("<0x"):
        return [token]
    if rng.random() < 0.5:
        return [token]
    vocabulary = tokenizer_vocabulary(name)
    at = rng.randint(1, len(text) - 1)
    parts = [text[:at], text[at:]]
    if not all(part in vocabulary for part in parts):
        parts = list(text)
    return [vocabulary[part] for part in parts]


_VOCABULARIES: dict[str, dict[str, int]] = {}


def tokenizer_vocabulary(name: str) -> dict[str, int]:
    if name not in _VOCABULARIES:
        _VOCABULARIES[name] = tokenizer_of(name).get_vocab()
    return _VOCABULARIES[name]


def answer(rng: random.Random, scene: Scene, played: Played, turn: Message | None) -> list[Message]:
    """Results of the calls, and sometimes a user besides; else a user."""
    answers = [
        told(rng, scene, played, "tool", name=one["function"]["name"], tool_call_id=one["id"])
        for one in (turn or {}).get("tool_calls", ())
    ]
    if not answers or rng.random() < 0.1:
        answers.append(told(rng, scene, played, "user"))
    return answers


def ended(
    rng: random.Random,
    scene: Scene,
    played: Played,
    sampled: list[int],
    answers: Sequence[Message],
) -> list[int]:
    """With the end token, or cut off at the limit."""
    if rng.random() < 0.05:
        played.is_whole = played.is_canonical = False
        return sampled[: rng.randint(1, len(sampled))]
    family = FAMILIES[scene.name]
    end = family.end
    if family.more_ends:
        end = "<|observation|>" if answers[0]["role"] == "tool" else "<|user|>"
    return [*sampled, tokenizer_of(scene.name).convert_tokens_to_ids(end)]


def plain_ids(template: DialogueTemplate, text: str) -> list[int]:
    return list(template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def decoded(template: DialogueTemplate, tokens: Sequence[int]) -> str:
    return str(
        template.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def check_markers(
    scene: Scene,
    tokens: Sequence[int],
    messages: Sequence[Message],
    sampled: Sequence[int] | None,
    played: Played,
) -> None:
    """What users and tools spell adds no token that steers the model."""
    if not played.is_hostile:
        return
    harmless = [
        {**one, "content": "x"} if one["role"] in ("user", "tool") else one for one in messages
    ]
    template = scene.template
    plain = template.prompt(harmless) if sampled is None else template.appended(harmless, sampled)
    markers = template.marker_ids
    if [t for t in tokens if t in markers] != [t for t in plain if t in markers]:
        played.faults.append("given words became a marker")


def check_message(turn: Message, message: Message, played: Played) -> None:
    """The environment is told what the model said, however it was cut into tokens."""
    functions = [one["function"] for one in message.get("tool_calls", ())]
    if functions != [one["function"] for one in turn.get("tool_calls", ())]:
        played.faults.append(f"calls {turn} were read as {message}")
    if message["content"].strip() != turn["content"].strip():
        played.faults.append(f"content {turn} was read as {message}")
    if message.get("reasoning_content") != turn.get("reasoning_content"):
        played.faults.append(f"thinking {turn} was read as {message}")


def handed_on(trajectory: Trajectory) -> list[tuple[int, bool, float]]:
    """Of each token behind the prompt, by what the trainer gets: whether it was drawn, and its
    log-prob, zero where it was given."""
    tokens = trajectory.tokens
    is_given = {place for start, behind in trajectory.given for place in range(start, behind)}
    log_probs = (value for turn in trajectory.turns for value in turn.log_probs or ())
    found = [
        (token, place not in is_given, 0.0 if place in is_given else next(log_probs, math.nan))
        for place, token in enumerate(tokens)
    ]
    assert next(log_probs, None) is None, "more log-probs than drawn tokens"
    return found


def check_whole(scene: Scene, played: Played) -> None:
    """Against the engine's record; and against the whole rendering where that is what grew."""
    trajectory, template = played.trajectory, scene.template
    found = handed_on(trajectory)
    for place, wrong in enumerate(
        (
            "the tokens are not those that were drawn and given",
            "the mask is wrong",
            "the log-probs are not those of the drawn tokens",
        )
    ):
        if [one[place] for one in found] != [one[place] for one in played.seen]:
            played.faults.append(wrong)
    if not played.is_whole:
        return
    if scene.rewrites and first_change(template, played.messages) is not None:
        played.is_whole = played.is_canonical = False
        return
    text = template.render(played.messages, to_go_on=True)
    tokens = [*trajectory.prompt, *trajectory.tokens]
    shown = decoded(template, tokens)
    if FAMILIES[scene.name].pieces:  # to these tokenizers the mark is a space
        shown, text_seen = shown.replace("\u2581", " "), text.replace("\u2581", " ")
    else:
        text_seen = text
    if shown != text_seen:
        played.faults.append("the text is not the template's")
    if played.is_canonical and not played.is_hostile and tokens != plain_ids(template, text):
        played.faults.append("the tokens are not those of the whole rendering")


def check_rows(scene: Scene, played: Played) -> None:
    """What the trainer takes: every drawn token once, behind the prompt that it was drawn behind,
    with its own numbers; and no more rows than prompts that are not what came before."""
    whole = played.trajectory.ended()
    numbers = tuple(p for turn in whole.turns for p in turn.log_probs or ())
    sample = TrainSample(
        sample=SampleId(PromptId("train", 0, 0), 0, 0),
        prompt_tokens=whole.prompt,
        response_tokens=whole.tokens,
        given=whole.given,
        rewritten=whole.rewritten,
        rollout_log_probs=numbers,
        advantage=tuple(float(place) for place in range(len(numbers))),
        token_weight=1.0,
    )
    rows = rows_of(sample)
    seen = [drawn for row in rows for drawn in drawn_in(row)]
    asked = [
        ((*prompt, *tokens[:place]), token, log_probs[place])
        for prompt, tokens, log_probs in played.turns
        for place, token in enumerate(tokens)
    ]
    if [(before, token, p) for before, token, p, _ in seen] != asked:
        played.faults.append("not every drawn token is trained on once, behind its own prompt")
    if [place for _, _, _, place in seen] != list(range(len(seen))):
        played.faults.append("an advantage is another token's")
    goes_on = [
        later[: len(before) + len(tokens)] == (*before, *tokens)
        for (before, tokens, _), (later, _, _) in itertools.pairwise(played.turns)
    ]
    if len(rows) != len(played.turns) - sum(goes_on):
        played.faults.append("there are more rows than prompts that were written anew")
    apart = [(row.prompt, row.tokens, row.given) for row in whole.rows]
    if apart != [(row.prompt_tokens, row.response_tokens, row.given) for row in rows]:
        played.faults.append("a trajectory and the trainer cut other rows")


def drawn_in(row: TrainSample) -> Iterator[tuple[tuple[int, ...], int, float, float]]:
    """Of each drawn token all that stands before it, itself, its log-prob and its advantage."""
    assert isinstance(row.advantage, tuple)
    places = outside(range(len(row.response_tokens)), row.given)
    for place, log_prob, advantage in zip(
        places, row.rollout_log_probs, row.advantage, strict=True
    ):
        before = (*row.prompt_tokens, *row.response_tokens[:place])
        yield before, row.response_tokens[place], log_prob, advantage
