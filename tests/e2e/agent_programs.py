"""The turns of ``lookup_task`` as agent programs: with openai's client, and as a shell script with curl."""

from __future__ import annotations

from pathlib import Path

OPENAI = """
import asyncio, json, os, random
from pathlib import Path

import openai

HERE = Path(__file__).parent
TOOL = {"name": "look_up", "description": "Return the number behind a number.", "parameters": {
    "type": "object", "required": ["word"], "properties": {
        "word": {"type": "string", "description": "The number."}}}}
clients = []

async def run(prompt, key, secret, base_url, api_key):
    if not clients:
        clients.append(openai.AsyncOpenAI(api_key="x", base_url=base_url, max_retries=40))
    timeout = float(HERE.joinpath("timeout").read_text())
    client = clients[0].with_options(base_url=base_url, api_key=api_key, timeout=timeout)
    messages, tools = [{"role": "user", "content": prompt}], [{"type": "function", "function": TOOL}]
    for _ in range(3):
        found = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        answer = found.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        await asyncio.sleep(random.SystemRandom().random() * float(HERE.joinpath("delay").read_text()))
        for one in answer.tool_calls:
            word = json.loads(one.function.arguments)["word"]
            told = secret if word == key else "-"
            messages.append({"role": "tool", "tool_call_id": one.id, "content": told})
    return None
"""
CURL = """\
read -r row
key=$(echo "$row" | jq -r .key)
secret=$(echo "$row" | jq -r .secret)
tools='[{"type": "function", "function": {"name": "look_up",
"description": "Return the number behind a number.", "parameters": {"type": "object",
"required": ["word"], "properties": {"word": {"type": "string", "description": "The number."}}}}}]'
messages=$(jq -nc --arg text "$key" '[{role: "user", content: $text}]')
for turn in 1 2 3; do
  body=$(jq -nc --argjson messages "$messages" --argjson tools "$tools" '{$messages, $tools}')
  answer=$(curl -sf "$OPENAI_BASE_URL/chat/completions" -d "$body") || exit 0
  message=$(echo "$answer" | jq -c .choices[0].message)
  id=$(echo "$message" | jq -r '.tool_calls[0].id // empty')
  [ -z "$id" ] && break
  word=$(echo "$message" | jq -r '.tool_calls[0].function.arguments | fromjson | .word')
  told=-; [ "$word" = "$key" ] && told=$secret
  messages=$(echo "$messages" | jq -c --argjson message "$message" --arg id "$id" --arg told "$told" \\
    '. + [$message, {role: "tool", tool_call_id: $id, content: $told}]')
done
echo "$message" | jq -rj '.content // empty'
"""
"""The last turn is its output; a status of curl other than 0 is that of a refusal, for want of room."""


def write(inputs: Path) -> Path:
    """Add the programs to the inputs of ``lookup_task``."""
    (inputs / "agent.py").write_text(OPENAI)
    (inputs / "agent.sh").write_text(CURL)
    patience(inputs, 60.0)
    return inputs


def patience(inputs: Path, seconds: float) -> None:
    """Let the client of openai give up after ``seconds``, and send its request again."""
    (inputs / "timeout").write_text(str(seconds))


def of_program(options: list[str], inputs: Path, program: str) -> list[str]:
    """Return options of ``lookup_task`` with a program, ``openai`` or ``curl``, for the environment."""
    kept = [option for option in options if not option.startswith("environment.")]
    agent = {
        "openai": f"agent.path={inputs / 'agent.py'}:run",
        "curl": f"agent.command='sh {inputs / 'agent.sh'}'",
    }
    # all at the same time, as episodes are: with async_steps it decides how far those of later batches get
    kept += ["agent.concurrency=512"]
    return [*kept, agent[program], f"agent.parser={inputs / 'late.py'}:calls", "agent.max_calls=3"]
