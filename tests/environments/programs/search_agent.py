"""An agent as it is written for any framework's OpenAI endpoint: it knows nothing of this one."""

import json
import os
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "what"}},
                "required": ["query"],
            },
        },
    }
]


def search(query: str) -> str:
    return f"{len(query)} results for {query}"


def run_agent(question: str, max_turns: int = 4, stream: bool = False) -> float:
    client = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    messages = [
        {"role": "system", "content": "Answer, or search."},
        {"role": "user", "content": question},
    ]
    num_letters = 0
    for _ in range(max_turns):
        if stream:
            text = ""
            with client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, temperature=1.0, stream=True
            ) as chunks:
                for chunk in chunks:
                    text += (chunk.choices and chunk.choices[0].delta.content) or ""
            message = {"role": "assistant", "content": text}
            calls = None
        else:
            response = client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, temperature=1.0
            )
            message = response.choices[0].message
            text, calls = message.content or "", message.tool_calls
        messages.append(message)
        num_letters += len(text)
        for call in calls or ():
            arguments = json.loads(call.function.arguments)
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": search(arguments.get("query", "")),
                }
            )
        if not calls:
            messages.append({"role": "user", "content": f"{len(text)} letters. And then?"})
    return num_letters % 4 / 4


if __name__ == "__main__":
    row = json.loads(os.environ["ROLLPACKER_ROW"])
    print("a line of its own")
    print(json.dumps({"reward": run_agent(row["question"], stream="--stream" in sys.argv)}))
