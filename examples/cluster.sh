#!/usr/bin/env bash
# Join machines to one Ray cluster and train on all of them.
#
#   examples/cluster.sh "node1 node2 node3" key=value ...
#
# The first machine becomes the head. Each needs ssh without a password and this repository, installed in
# .venv (`make .venv/dev`), in the same folder: best a shared one, where the run folder has to be anyway.
# The cluster stays up for the next run; `.venv/bin/ray stop` on each machine ends it.
set -euo pipefail

read -ra nodes <<<"${1:?the machines, in one quoted list, come first}"
shift
head=${nodes[0]}
ray=.venv/bin/ray

on() { ssh "$1" "cd $(printf %q "$PWD") && ${*:2}"; }

on "$head" "$ray start --head --port=6379"
for node in "${nodes[@]:1}"; do
  on "$node" "$ray start --address=$head:6379"
done

# The head takes jobs a few seconds after it has started.
until on "$head" "$ray job list --address=http://127.0.0.1:8265" >/dev/null 2>&1; do sleep 1; done
sleep 5

on "$head" "$ray job submit --address=http://127.0.0.1:8265 --" \
  "$(printf %q "$PWD")/.venv/bin/strop train trainer.nnodes=${#nodes[@]} $(printf '%q ' "$@")"
