#!/usr/bin/env bash
# Join machines to one Ray cluster and train on all of them.
#
#   examples/cluster.sh "node1 node2 node3" key=value ...
#
# The first machine becomes the head. Every machine needs passwordless ssh and this repository at the same
# path, installed in .venv (`make .venv/dev`). A shared file system is simplest: the run folder requires one.
# The cluster stays up for the next run; stop it with `.venv/bin/ray stop` on each machine.
set -euo pipefail

read -ra nodes <<<"${1:?the first argument is the quoted list of machines}"
shift
head=${nodes[0]}
ray=.venv/bin/ray

on() { ssh "$1" "cd $(printf %q "$PWD") && ${*:2}"; }

# `ray job stop` kills a job 3 s after its SIGTERM otherwise, before the run has saved what it has done.
on "$head" "RAY_JOB_STOP_WAIT_TIME_S=3600 $ray start --head --port=6379"
for node in "${nodes[@]:1}"; do
  on "$node" "RAY_JOB_STOP_WAIT_TIME_S=3600 $ray start --address=$head:6379"
done

# The head accepts jobs only a few seconds after it starts.
until on "$head" "$ray job list --address=http://127.0.0.1:8265" >/dev/null 2>&1; do sleep 1; done
sleep 5

# As a file: Ray hands the words of a command to a shell, which would read their quotes once more.
job=/tmp/strop_job_$$.sh
printf '%q ' "$PWD/.venv/bin/strop" train "trainer.nnodes=${#nodes[@]}" "$@" | on "$head" "cat >$job"
on "$head" "$ray job submit --address=http://127.0.0.1:8265 -- bash $job"
