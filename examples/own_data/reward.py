"""Two rewards over the columns of questions.jsonl."""


def text_of(completion):
    """A text; where the rows hold chat messages, the assistant's message in a list."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def names_the_city(completions, answer, **columns):
    replies = [text_of(completion) for completion in completions]
    return [float(a.lower() in r.lower()) for r, a in zip(replies, answer, strict=True)]


def brevity(completions, finish_reasons, **columns):
    lengths = [len(text_of(completion).split()) for completion in completions]
    return [
        1.0 / max(length, 1) if reason == "stop" else 0.0
        for length, reason in zip(lengths, finish_reasons, strict=True)
    ]
