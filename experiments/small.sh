# A real chat model, end to end: SmolLM2-135M-Instruct is warm-started with thinking and without, trained by GRPO and DPO
# against a reward model of our own, and by GRPO on verified instructions; then evaluated.
#
#   bash experiments/small.sh                                     # every stage; an interrupted one goes on where it was
#   STAGES="data sft" bash experiments/small.sh                   # some of them
#   MODEL=data/other-model RESULTS=results/other bash experiments/small.sh
#
# It takes 12 GB. On two CPU cores with bfloat16 instructions it takes about half a day; on one GPU the same commands should
# take minutes, which has not been tried.
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first stage into your shell before.
: "${STAGES:=data reward sft grpo dpo rlvr evaluate samples table}"
: "${RESULTS:=results/small}" "${DATA:=data/small}" "${MODEL:=data/smollm2}"
: "${SEEDS:=0 1}" # of the runs that are compared, RLMT and RLHF
: "${PROMPTS:=allenai/tulu-3-wildchat-if-on-policy-8b}" # or the authors' file wildchat-if_train.parquet
: "${ALPACA:=}"         # a copy of the repository tatsu-lab/alpaca_eval; empty: git downloads what is needed of it
: "${IFEVAL:=google/IFEval}" # or its file
RUNS="$RESULTS/runs"
export GOLD="$RUNS/reward-gold/model" # experiments/small_judge.py reads it

stage() { [[ " $STAGES " == *" $1 "* ]]; }

# --- 1. data: the model, prompts, pairs of two disjoint sets of instructions, traces, prompts whose answers are verified

# make OUT MODULE WORDS...: runs the module to write OUT, unless that is there
make() {
  if [ ! -e "$1" ]; then
    python -m "${@:2}" --out "$1"
  fi
}

if stage data; then
  make "$MODEL" data.prepare smollm2

  short="wildchat-if --input $PROMPTS --max-characters 400"
  make "$DATA/prompts_eval.jsonl" data.prepare $short --n 400 --seed 1
  make "$DATA/prompts_gold.jsonl" data.prepare $short --n 64 --seed 2 --exclude "$DATA/prompts_eval.jsonl"
  make "$DATA/prompts.jsonl" data.prepare $short --exclude "$DATA/prompts_eval.jsonl" "$DATA/prompts_gold.jsonl"
  make "$DATA/instructions.jsonl" data.make_instructions --prompts "$DATA/prompts.jsonl" --n 2000 --exclude "$IFEVAL"

  make "$DATA/alpaca" data.prepare alpaca-pairs ${ALPACA:+--input "$ALPACA"}
  make "$DATA/traces.jsonl" data.prepare plans --input "$DATA/alpaca/responses.jsonl" --max-characters 800
fi

# --- 2. two reward models: the proxy, which is trained on, and gold, which only measures; each held out from the other's pairs

if stage reward; then
  python train_reward.py --preset small --model "$MODEL" --pairs "$DATA/alpaca/pairs_a.jsonl" \
    --held-out-pairs "$DATA/alpaca/pairs_b.jsonl" --out "$RUNS/reward-proxy" --resume
  python train_reward.py --preset small --model "$MODEL" --pairs "$DATA/alpaca/pairs_b.jsonl" \
    --held-out-pairs "$DATA/alpaca/pairs_a.jsonl" --out "$RUNS/reward-gold" --resume
fi

# --- 3. warm start, with thinking and without

if stage sft; then
  python train_sft_warmstart.py --preset small --model "$MODEL" --traces "$DATA/traces.jsonl" \
    --out "$RUNS/sft-think" --resume
  python train_sft_warmstart.py --preset small --model "$MODEL" --traces "$DATA/traces.jsonl" \
    --think-format plain --out "$RUNS/sft-plain" --resume
fi

# --- 4. RLMT and RLHF: the pair that the paper is about

RL="--preset small --prompts $DATA/prompts.jsonl --reward-model $RUNS/reward-proxy/model \
  --gold $GOLD --gold-prompts $DATA/prompts_gold.jsonl"

if stage grpo; then
  for seed in $SEEDS; do
    python train_grpo.py $RL --model "$RUNS/sft-think/model" --seed "$seed" --out "$RUNS/grpo-think-s$seed" --resume
    python train_grpo.py $RL --model "$RUNS/sft-plain/model" --think-format plain --seed "$seed" \
      --out "$RUNS/grpo-plain-s$seed" --resume
  done
fi

if stage dpo; then
  python train_dpo.py $RL --model "$RUNS/sft-think/model" --out "$RUNS/dpo-think" --resume
  python train_dpo.py $RL --model "$RUNS/sft-plain/model" --think-format plain --out "$RUNS/dpo-plain" --resume
fi

# --- 5. RLVR: instructions that a checker verifies

if stage rlvr; then
  python train_grpo.py --preset small-instructions --model "$RUNS/sft-plain/model" --prompts "$DATA/instructions.jsonl" \
    --out "$RUNS/rlvr-plain" --resume
fi

# --- 6. evaluation: gold reward of one answer to each of 400 prompts, and IFEval

# answer MODEL PROMPTS OUT: one answer to each prompt, with its gold and its proxy reward
answer() {
  python eval_wildbench.py --model "$1" --tasks "$2" --judge experiments/small_judge.py:judge \
    --reward-model "$RUNS/reward-proxy/model" --reward-on response --max-tokens 256 --max-invalid 1 \
    --rollout vllm --dtype bfloat16 --out "$3" --resume
}

# evaluate MODEL NAME: both evaluations of a model
evaluate() {
  answer "$1" "$DATA/prompts_eval.jsonl" "$RUNS/eval-$2"
  python eval_benchmarks.py ifeval --data "$IFEVAL" --model "$1" --max-tokens 400 --temperature 0.7 \
    --rollout vllm --dtype bfloat16 --out "$RUNS/ifeval-$2" --resume
}

if stage evaluate; then
  evaluate "$MODEL" instruct
  for name in sft-think sft-plain dpo-think dpo-plain rlvr-plain; do
    evaluate "$RUNS/$name/model" "$name"
  done
  for seed in $SEEDS; do
    evaluate "$RUNS/grpo-think-s$seed/model" "grpo-think-s$seed"
    evaluate "$RUNS/grpo-plain-s$seed/model" "grpo-plain-s$seed"
  done
  for name in sft-plain rlvr-plain; do # RLVR's number, greedy
    python eval_benchmarks.py ifeval --data "$IFEVAL" --model "$RUNS/$name/model" --max-tokens 400 --temperature 0 \
      --rollout vllm --dtype bfloat16 --out "$RUNS/ifeval-greedy-$name" --resume
  done
fi

# --- 7. samples: every answer of the models before and after GRPO to twenty prompts of our own, to be read

if stage samples; then
  seed=${SEEDS%% *} # the first
  names="sft-think sft-plain grpo-think-s$seed grpo-plain-s$seed"
  answer "$MODEL" experiments/small_prompts.jsonl "$RUNS/samples-instruct"
  for name in $names; do
    answer "$RUNS/$name/model" experiments/small_prompts.jsonl "$RUNS/samples-$name"
  done
  python -m experiments.small_samples --results "$RESULTS" --names instruct $names
fi

# --- 8. table, curves

if stage table; then
  python -m experiments.small_tables --results "$RESULTS" --seeds $SEEDS
fi
