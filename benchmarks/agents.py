"""Measure the endpoint of agent programs: memory, descriptors, seconds, and the share of time that waits.

    python benchmarks/agents.py [--sessions 1000] [--out FILE]

The policy says one letter at once (`scripted_agents.py` of the tests), so the figures are those of the
endpoint and of the programs. `coroutines`: 256 programs of 1 to 8 requests each in one process, which share a
client of openai; `processes`: 16 programs of a shell, with curl; `idle`: sessions that have asked once and
then sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "agents"), str(ROOT / "examples")]

from machine import description  # noqa: E402
from scripted_agents import Agents  # noqa: E402

CLIENTS: list[Any] = []


async def unequal(base_url: str, number: int, delay: float) -> str:
    """Ask 1 to 8 times, and think for up to ``delay`` seconds between."""
    import random

    import openai

    if not CLIENTS:
        CLIENTS.append(openai.AsyncOpenAI(base_url=base_url, api_key="x", timeout=600))
    client = CLIENTS[0].with_options(base_url=base_url)
    messages = [{"role": "user", "content": "Hi"}]
    for _ in range(1 + number % 8):
        found = await client.chat.completions.create(model="m", messages=messages)
        messages += [found.choices[0].message, {"role": "user", "content": "b"}]
        await asyncio.sleep(random.SystemRandom().random() * delay)
    return "end"


async def idle(base_url: str, seconds: float) -> str:
    """Ask once, and sleep."""
    import openai

    if not CLIENTS:
        CLIENTS.append(openai.AsyncOpenAI(base_url=base_url, api_key="x", timeout=600))
    client = CLIENTS[0].with_options(base_url=base_url)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    await asyncio.sleep(seconds)
    return "end"


CURL = """read -r row
for turn in 1 2 3; do
curl -s "$OPENAI_BASE_URL/chat/completions" -d '{"messages": [{"role": "user", "content": "Hi"}]}' > /dev/null
done
echo end"""


class Watch:
    """The largest memory and number of descriptors of this process, and of those that it has started."""

    def __init__(self) -> None:
        self.own = psutil.Process()
        self.before = self.own.memory_info().rss
        self.most = {"own MiB": 0.0, "own files": 0.0, "programs MiB": 0.0, "programs files": 0.0}
        self._open = True
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while self._open:
            children = self.own.children(recursive=True)
            now = {
                "own MiB": (self.own.memory_info().rss - self.before) / 2**20,
                "own files": self.own.num_fds(),
            }
            sizes, files = 0, 0
            for child in children:
                try:
                    sizes, files = sizes + child.memory_info().rss, files + child.num_fds()
                except psutil.Error:
                    continue
            now |= {"programs MiB": sizes / 2**20, "programs files": files}
            self.most = {name: max(value, now[name]) for name, value in self.most.items()}
            time.sleep(0.1)

    def end(self) -> dict[str, float]:
        """Return the largest values."""
        self._open = False
        return self.most


def measure(program: Any, sessions: int, settings: dict[str, Any], **columns: Any) -> list[str]:
    """Return the cells of a row: seconds, CPU seconds, memory, descriptors, share of time that waits."""
    agents = Agents(program, prompts=sessions, **settings)
    watch, begun, cpu = Watch(), time.monotonic(), os.times()
    try:
        result = agents.play(**{name: [value] * sessions for name, value in columns.items()})
    finally:
        agents.close()
    seconds, now, most = time.monotonic() - begun, os.times(), watch.end()
    used = sum(now[:4]) - sum(cpu[:4])
    requests = int(result.batch["n_turns"].sum())
    share = result.batch["agent_waiting"][0].item()
    lost = int((result.batch["ended_by"] == 5).sum())
    return [
        str(requests), f"{seconds:.1f}", f"{used:.1f}", f"{most['own MiB']:.0f}", f"{most['own files']:.0f}",
        f"{most['programs MiB']:.0f}", f"{most['programs files']:.0f}", f"{share:.2f}", str(lost),
    ]  # fmt: skip


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000, help="idle ones")
    parser.add_argument("--out", type=Path, help="file for the table")
    given = parser.parse_args()
    steps: dict[str, tuple[Any, int, dict[str, Any], dict[str, Any]]] = {
        "coroutines, lockstep": (unequal, 256, {}, {"delay": 0.2}),
        "coroutines, lockstep off": (unequal, 256, {"lockstep": False}, {"delay": 0.2}),
        "processes (16)": (CURL, 16, {"concurrency": 16}, {}),
        f"idle ({given.sessions})": (idle, given.sessions, {}, {"seconds": 5.0}),
    }
    names = (
        "programs | requests | seconds | CPU seconds | MiB grown | descriptors | MiB of programs | "
        "descriptors of programs | share that waits | lost"
    )
    lines = [f"| {names} |", "| --- |" + " ---: |" * 9]
    for name, (program, sessions, settings, columns) in steps.items():
        lines.append(f"| {name} | {' | '.join(measure(program, sessions, settings, **columns))} |")
        print(lines[-1], flush=True)
    if given.out:
        head = ["# Agents", "", description("aiohttp", "openai", threads=1), "`benchmarks/agents.py`.", ""]
        given.out.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
