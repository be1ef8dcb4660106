#!/usr/bin/env bash
# One model from end to end on two cores: fine-tuned on calls of a tool, trained by GRPO to use it while the next
# answers are generated, stopped and resumed, evaluated, served, and asked by a program. docs/story.md has its figures.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/smollm2.sh
make --silent .venv/agents

OUT=runs/story TOOL=examples/calculator.py
SHOWN=data.chat_template=examples/tools.jinja # SmolLM2's own shows no tools
TURNS=($SHOWN environment.tools=[$TOOL:calculate] environment.max_turns=3 data.answer_key=answer
    actor_rollout_ref.model.compute_dtype=bfloat16)
AHEAD=(trainer.async_steps=1 trainer.worker_group=local actor_rollout_ref.hybrid_engine=False
    'trainer.resource_pools={learner: [1], rollout: [1]}' 'trainer.placement={Rollout: rollout}'
    actor_rollout_ref.actor.rollout_is=token)
strop() { $PYTHON -m strop "$@"; }
train() { # the same command starts and resumes
    exec $PYTHON -m strop train $OUT/warm_up/final_model $OUT/data/train.jsonl --reward $TOOL:right --steps 6 \
        --n 4 --out $OUT/run "${TURNS[@]}" "${AHEAD[@]}" data.train_batch_size=8 data.max_prompt_length=64 \
        data.max_response_length=96 actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.temperature=0.7
}
accuracy() { # MODEL NAME KEYS
    strop eval "$1" --data $OUT/data/test.jsonl --limit 40 --reward $TOOL:right --max-response-length 96 \
        --out "$OUT/$2" "${TURNS[@]}" "${@:3}"
}

$PYTHON $TOOL $OUT/data
strop sft $MODEL $OUT/data/warm_up.jsonl --lr 2e-5 --steps 18 --out $OUT/warm_up data.val_files=[] $SHOWN \
    data.train_batch_size=16 model.compute_dtype=bfloat16
accuracy $OUT/warm_up before

(train) & # stopped after two iterations, as by Ctrl-C
while kill -0 $! && [ "$(cat $OUT/run/metrics.jsonl 2>/dev/null | wc -l)" -lt 2 ]; do sleep 1; done
kill $! && wait $! || echo "status $?"
(train)

accuracy $OUT/run after
accuracy $OUT/run off "environment.tools=[$TOOL:off]"

export STROP_SERVE_TOKEN=story OPENAI_API_KEY=story OPENAI_BASE_URL=http://127.0.0.1:8399/v1
$PYTHON -m strop serve $OUT/run $SHOWN --port 8399 &
while kill -0 $! && ! curl -s -o /dev/null $OPENAI_BASE_URL/models; do sleep 1; done
$PYTHON examples/story_agent.py "What is 345 times 678?" "What is 912 times 107?"
kill $!
