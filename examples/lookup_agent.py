"""An agent that uses a tool: the program of `examples/agent_demo.py`.

It owns its loop, its messages and its tool, and speaks to the policy with OpenAI's client. A program that
exists already needs the address and the key that it is given here, and returns its answer.
"""

from __future__ import annotations

import json

import openai

TOOL = {
    "name": "look_up",
    "description": "Return the number behind a number.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "description": "The number."}},
        "required": ["word"],
    },
}
clients: list[openai.AsyncOpenAI] = []


async def run(prompt: str, key: str, secret: str, base_url: str, api_key: str) -> str:
    """Answer a prompt. The arguments are columns of the row, and the address of the policy."""
    return await chat(prompt, {key: secret}, base_url, api_key)


async def without_tool(prompt: str, base_url: str, api_key: str) -> str:
    """Answer a prompt with a tool that finds nothing."""
    return await chat(prompt, {}, base_url, api_key)


async def chat(prompt: str, known: dict[str, str], base_url: str, api_key: str) -> str:
    """Ask, run the calls, and ask again, until an answer has none."""
    if not clients:  # all programs of a process share its connections
        clients.append(openai.AsyncOpenAI(base_url=base_url, api_key=api_key))
    client = clients[0].with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": prompt}]
    for _ in range(3):
        found = await client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}]
        )
        answer = found.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return answer.content or ""
        for call in answer.tool_calls:
            word = json.loads(call.function.arguments)["word"]
            told = {"role": "tool", "tool_call_id": call.id, "content": known.get(word, "-")}
            messages.append(told)
    return ""
