"""Ray workers forked from a server that has torch, transformers and the trainer loaded.

Ray starts each worker as an interpreter that runs a set-up script and then as a second interpreter, which
imports torch and the trainer: 6 s of CPU time. This file replaces the set-up script: it sends arguments,
environment and output files to the server, which forks, and exits with the fork. The server does not import
Ray, because Ray's library reads the environment only once.
"""

import contextlib
import json
import os
import signal
import socket
import sys

ADDRESS = "STROP_TEST_RAY_WORKERS"
_SIZE = 8


def use(folder: str) -> None:
    """Start a server in ``folder`` and let all Ray clusters of this process fork their workers from it."""
    import time

    from ray._private import ray_constants

    import forked

    address = os.path.join(folder, "ray")
    server = forked.CONTEXT.Process(target=_serve, args=(address, os.getcwd()), daemon=True)
    server.start()
    while not os.path.exists(address):
        if server.exitcode is not None:
            raise RuntimeError(f"the server of Ray's workers ended with status {server.exitcode}")
        time.sleep(0.05)
    os.environ[ADDRESS] = address
    ray_constants.SETUP_WORKER_FILENAME = os.path.abspath(__file__)  # joined to Ray's folder, and absolute


def _serve(address: str, folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    parent = os.getppid()
    server = socket.socket(socket.AF_UNIX)
    server.bind(address + ".new")
    server.listen(64)
    os.rename(address + ".new", address)
    server.settimeout(5)
    while os.getppid() == parent:
        try:
            client, _ = server.accept()
        except TimeoutError:
            continue
        client.settimeout(None)
        data, files, _, _ = socket.recv_fds(client, 1 << 16, 3)
        while len(data) < _SIZE or len(data) < _SIZE + int.from_bytes(data[:_SIZE], "big"):
            data += client.recv(1 << 16)
        if os.fork() == 0:
            server.close()
            os.setpgid(0, 0)
            client.sendall(os.getpid().to_bytes(_SIZE, "big"))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _become_worker(json.loads(data[_SIZE:]), files)
        for file in [*files, client.detach()]:
            os.close(file)


def _become_worker(message: list, files: list[int]) -> None:
    import runpy
    import traceback

    arguments, environment, folder = message
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    context = json.loads(_option(arguments, "--serialized-runtime-env-context") or "{}")
    os.environ.update(context.get("env_vars") or {})
    _option(arguments, "--language")
    script = next(argument for argument in arguments if argument.endswith("default_worker.py"))
    sys.argv = [script, *(argument for argument in arguments if argument != script)]
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _option(arguments: list[str], name: str) -> str | None:
    """Remove an option from ``arguments`` and return its value, or None."""
    for index, argument in enumerate(arguments):
        if argument.startswith(name + "="):
            return arguments.pop(index).partition("=")[2]
        if argument == name:
            arguments.pop(index)
            return arguments.pop(index)
    return None


def _main() -> None:
    data = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    data = len(data).to_bytes(_SIZE, "big") + data
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ[ADDRESS])
    sent = socket.send_fds(server, [data], [0, 1, 2])
    server.sendall(data[sent:])
    fork = int.from_bytes(server.recv(_SIZE), "big")
    server.recv(1)  # the fork has the other end open until it ends
    with contextlib.suppress(ProcessLookupError):
        os.killpg(fork, signal.SIGKILL)  # its children, as Ray does where a worker is a child of its own


if __name__ == "__main__":
    _main()
