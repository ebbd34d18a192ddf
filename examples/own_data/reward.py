"""Two rewards over the columns of questions.jsonl."""


def names_the_city(completions, answer, **columns):
    replies = [messages[-1]["content"] for messages in completions]
    return [float(a.lower() in r.lower()) for r, a in zip(replies, answer, strict=True)]


def brevity(completions, finish_reasons, **columns):
    lengths = [len(messages[-1]["content"].split()) for messages in completions]
    return [
        1.0 / max(length, 1) if reason == "stop" else 0.0
        for length, reason in zip(lengths, finish_reasons, strict=True)
    ]
