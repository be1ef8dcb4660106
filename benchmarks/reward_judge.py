"""Measure an async reward function that calls a judge over HTTP.

    python benchmarks/reward_judge.py [--out FILE]

A server on the loopback address answers every request after 0.3 s (a thread a connection, in a separate
process). The reward function is ``async def`` and posts prompt and response with asyncio's own streams, a
connection a request. A batch is submitted at once, as after a generation, through the job and the process
that training uses; the process runs before the clock starts. "ideal" is 0.3 s times the answers over the
concurrency, rounded up to whole rounds. Every score is compared with the judge's rule, and the server reports
the most requests that were open at the same time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from machine import description

from strop.rewards.arguments import Sample
from strop.rewards.batch import ScoringJob
from strop.rewards.reward_output import ErrorBudget
from strop.rewards.worker.pool import RewardPool

WAIT_S = 0.3


def serve(port: Any, most: Any) -> None:
    """Answer requests after ``WAIT_S``; keep the most open requests in ``most``."""
    lock, is_open = threading.Lock(), [0]

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with lock:
                is_open[0] += 1
                most.value = max(most.value, is_open[0])
            text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["response"]
            time.sleep(WAIT_S)
            body = json.dumps({"score": len(text) % 7}).encode()
            with lock:
                is_open[0] -= 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024

    with Server(("127.0.0.1", 0), Judge) as server:
        port.value = server.server_address[1]
        server.serve_forever()


def make_judge(port: int) -> Any:
    """Return the reward function; made here, it is sent to the scoring process by value."""

    async def compute_score(prompt: str, response: str) -> float:
        import asyncio
        import json

        body = json.dumps({"prompt": prompt, "response": response}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST / HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        return json.loads(answer.partition(b"\r\n\r\n")[2])["score"]

    return compute_score


def measure(port: int, answers: int, concurrency: int) -> tuple[float, int]:
    """Return the seconds for a batch, and how many scores are wrong."""
    samples = [Sample("d", "x" * (row % 50), named={"prompt": f"question {row}"}) for row in range(answers)]
    process = RewardPool(make_judge(port), num_workers=1, timeout_s=10.0, max_concurrency=concurrency)
    try:
        process.start()
        started = time.monotonic()
        job = ScoringJob(process, ErrorBudget(1.0), n_rows=answers, n_scored=answers)
        for row, sample in enumerate(samples):
            job.add(row, lambda sample=sample: sample)
        job.end()
        outcomes = job.outcomes()
        seconds = time.monotonic() - started
    finally:
        process.close()
    pairs = zip(samples, outcomes, strict=True)
    wrong = sum(
        outcome is None or bool(outcome.error) or outcome.score != len(sample.solution_str) % 7
        for sample, outcome in pairs
    )
    return seconds, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--answers", type=int, nargs="+", default=[48, 1024])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 8, 1])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    port, most = context.Value("i", 0), context.Value("i", 0)
    server = context.Process(target=serve, args=(port, most), daemon=True)
    server.start()
    while not port.value:
        time.sleep(0.01)
    lines = [
        "# A reward function that calls a judge over HTTP",
        "",
        "`python benchmarks/reward_judge.py`, whose first lines say what is measured; other work was running "
        "on the machine.",
        "",
        description(threads=1),
        "",
        "| answers | concurrency | s | s, ideal | s / ideal | most requests at once | wrong |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for answers in args.answers:
        for concurrency in args.concurrency:
            most.value = 0
            seconds, wrong = measure(port.value, answers, concurrency)
            ideal = WAIT_S * math.ceil(answers / concurrency)
            cells = [answers, concurrency, f"{seconds:.2f}", f"{ideal:.2f}", f"{seconds / ideal:.2f}"]
            lines.append("| " + " | ".join(map(str, [*cells, most.value, wrong])) + " |")
            print(lines[-1], flush=True)
            if args.out:  # the longest case takes minutes
                args.out.write_text("\n".join([*lines, ""]))
    server.terminate()


if __name__ == "__main__":
    main()
