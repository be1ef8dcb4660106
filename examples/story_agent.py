"""Ask a served model, and run the calculator for it: the agent program of `examples/story.sh`.

`OPENAI_BASE_URL` and `OPENAI_API_KEY` have the address and the key of the server.
"""

from __future__ import annotations

import json
import sys

import openai
from calculator import TOOL, calculate


def ask(client: openai.OpenAI, question: str) -> str:
    """Return the answer to a question, after the calls that the model makes."""
    messages = [{"role": "user", "content": question}]
    for _ in range(3):
        found = client.chat.completions.create(
            model="story",
            messages=messages,
            tools=[{"type": "function", "function": TOOL}],
            temperature=0,
            max_tokens=64,
        )
        answer = found.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result = calculate(**json.loads(call.function.arguments))
            print(f"  {call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return answer.content or ""


if __name__ == "__main__":
    for question in sys.argv[1:]:
        print(question)
        print(f"  {ask(openai.OpenAI(), question)}")
