"""The end of a process with everything that it started."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKS_AMONG_KILLS = """
import os, subprocess, sys
from strop import process_tree

def start(*command):
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

def fork_first(identity, number, kill=os.kill):
    if len(started) == 1:
        started.append(start("sh", "-c", "sleep 600 & sleep 600"))
    kill(identity, number)

def none(identity):
    raise OSError("not implemented")

process_tree.become_subreaper()
started, os.kill = [start("sleep", "600")], fork_first
orphans = start("sh", "-c", "sleep 600 &")
orphans.wait()
if sys.argv[1] == "no pidfds":
    os.pidfd_open = none
if sys.argv[1] == "no lists of children":
    os.path.exists = lambda path: False
process_tree.kill_descendants(os.getpid())
statuses = set()
try:
    while True:  # one that lives would sleep for ten minutes
        statuses.add(os.waitpid(-1, 0)[1])
except ChildProcessError:
    print(len(started), statuses)
"""


@pytest.mark.parametrize(
    ("lacks", "left"), [("nothing", "set()"), ("no pidfds", "{9}"), ("no lists of children", "set()")]
)
def test_processes_that_are_forked_while_others_are_killed_are_killed_too(lacks, left):
    """On systems without pidfds, too, whose zombies are left, with SIGKILL as their status."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS_AMONG_KILLS, lacks], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout.strip(), done.stderr) == (f"2 {left}", "")
