#!/usr/bin/env bash
# A model learns to use a calculator: a warm-up by strop sft in the notation of calls, then GRPO over turns.
# Arguments are added to the command of GRPO.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/smollm2.sh

OUT=runs/calculator TOOL=examples/calculator.py
SYSTEM='data.system_prompt="calculate(expression) is your calculator."'
TURNS=("$SYSTEM" data.answer_key=answer environment.tools=[$TOOL:calculate] environment.parser=hermes
    environment.max_turns=3 data.max_prompt_length=64 data.max_response_length=96)
accuracy() { # MODEL NAME KEYS
    $PYTHON -m strop.cli eval "$1" --data $OUT/data/test.jsonl --reward $TOOL:right --out "$OUT/$2" "${TURNS[@]}" "${@:3}"
}

$PYTHON $TOOL $OUT/data
$PYTHON -m strop.cli sft model.path=$MODEL data.train_files=$OUT/data/warm_up.jsonl data.val_files=[] "$SYSTEM" \
    data.train_batch_size=16 update.optim.lr=2e-5 trainer.default_local_dir=$OUT/warm_up
accuracy $OUT/warm_up before
$PYTHON -m strop.cli train $OUT/warm_up/final_model $OUT/data/train.jsonl --reward $TOOL:right --steps 10 --n 4 \
    --out $OUT/run "${TURNS[@]}" data.train_batch_size=8 actor_rollout_ref.rollout.name=hf "$@"
accuracy $OUT/run after
accuracy $OUT/run off "environment.tools=[$TOOL:off]"
