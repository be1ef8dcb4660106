"""Train an agent that has a loop of its own, on a CPU in a few minutes: `make agent-demo`.

The task, the model and its warm-up are those of `tool_demo.py`: a prompt is a number, and the right answer is
another one that only a tool knows. Here the tool is no part of strop: `lookup_agent.py` runs it, in the loop
of a program that asks for chat completions.
"""

from __future__ import annotations

from pathlib import Path

from tool_demo import demo

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Let the program have the tool."""
    keys = {"parser": f"{FOLDER / 'tool_demo.py'}:calls", "max_calls": 3}
    with_tool, without = (f"{FOLDER / 'lookup_agent.py'}:{name}" for name in ("run", "without_tool"))
    demo("agent_demo", {"agent": {"path": with_tool, **keys}}, {"agent": {"path": without, **keys}})


if __name__ == "__main__":
    main()
