#!/usr/bin/env bash
# The first command of the README, where the Hugging Face hub is out of reach: the same model comes from a package of
# the Python index. SmolLM2-135M-Instruct learns one-digit sums with GRPO on two cores. Arguments are added to the
# command, for example data.val_files=examples/sums_test.csv trainer.test_freq=10.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/smollm2.sh

$PYTHON -m strop train $MODEL examples/sums.csv --reward examples/sums_reward.py --steps 30 --out runs/sums \
    data.train_batch_size=8 data.max_response_length=16 actor_rollout_ref.rollout.name=hf "$@"
