# A real chat model, end to end: SmolLM2-135M-Instruct is warm-started with thinking and without, trained by GRPO and DPO
# against a reward model of our own, and by GRPO on verified instructions; then evaluated.
#
#   bash experiments/small.sh                                     # every stage; an interrupted one goes on where it was
#   STAGES="data sft" bash experiments/small.sh                   # some of them
#   MODEL=data/other-model RESULTS=results/other bash experiments/small.sh
#
# docs/small.md has the times that were measured, of some stages on two CPU cores; none were measured on a GPU.
# Stages data and evaluate need NLTK's data: python -m nltk.downloader punkt_tab stopwords averaged_perceptron_tagger_eng
set -euo pipefail
shopt -s nullglob # what is not trained does not answer
# Settings. To copy single commands, paste the lines from here to the first stage into your shell before.
: "${STAGES:=data reward sft grpo dpo rlvr evaluate samples table}"
: "${RESULTS:=results/small}" "${DATA:=data/small}" "${MODEL:=data/smollm2}"
: "${SEEDS:=0 1}" # of the runs that are compared, RLMT and RLHF
: "${DTYPE:=auto}" # bfloat16 on a GPU, float32 on a CPU; docs/small.md says which CPUs are faster with bfloat16
: "${PROMPTS:=allenai/tulu-3-wildchat-if-on-policy-8b}" # or the authors' file wildchat-if_train.parquet
: "${ALPACA:=}"         # a copy of the repository tatsu-lab/alpaca_eval; empty: git downloads what is needed of it
: "${IFEVAL:=google/IFEval}" # or its file
RUNS="$RESULTS/runs" SMALL="--preset small --dtype $DTYPE"
export GOLD="$RUNS/reward-gold/model" DTYPE # experiments/small_judge.py reads both

stage() { [[ " $STAGES " == *" $1 "* ]]; }

# --- 1. data: the model, prompts, pairs of two disjoint sets of instructions, traces, prompts whose answers are verified

# make OUT MODULE WORDS...: runs the module to write OUT, unless that is there: other PROMPTS or ALPACA need another DATA
make() {
  if [ ! -e "$1" ]; then
    python -m "${@:2}" --out "$1"
  fi
}

if stage data; then
  if [ "$MODEL" = data/smollm2 ]; then
    make "$MODEL" data.prepare smollm2
  fi

  short="wildchat-if --input $PROMPTS --max-characters 400"
  make "$DATA/prompts_eval.jsonl" data.prepare $short --n 200 --seed 1
  make "$DATA/prompts_gold.jsonl" data.prepare $short --n 64 --seed 2 --exclude "$DATA/prompts_eval.jsonl"
  make "$DATA/prompts.jsonl" data.prepare $short --exclude "$DATA/prompts_eval.jsonl" "$DATA/prompts_gold.jsonl"
  make "$DATA/instructions.jsonl" data.make_instructions --prompts "$DATA/prompts.jsonl" --n 2000 --exclude "$IFEVAL"

  make "$DATA/alpaca" data.prepare alpaca-pairs ${ALPACA:+--input "$ALPACA"}
  make "$DATA/traces.jsonl" data.prepare plans --input "$DATA/alpaca/responses.jsonl" --max-characters 500
fi

# train SCRIPT NAME FLAGS...: trains the run NAME
train() {
  python "train_$1.py" "${@:3}" --out "$RUNS/$2" --resume
}

# --- 2. two reward models: the proxy, which is trained on, and gold, which only measures; each held out from the other's pairs

if stage reward; then
  a=$DATA/alpaca/pairs_a.jsonl b=$DATA/alpaca/pairs_b.jsonl
  train reward reward-proxy $SMALL --model "$MODEL" --pairs "$a" --held-out-pairs "$b"
  train reward reward-gold $SMALL --model "$MODEL" --pairs "$b" --held-out-pairs "$a"
fi

# --- 3. warm start, with thinking and without

SFT="$SMALL --model $MODEL --traces $DATA/traces.jsonl"

if stage sft; then
  train sft_warmstart sft-think $SFT
  train sft_warmstart sft-plain $SFT --think-format plain
fi

# --- 4. RLMT and RLHF: the pair that the paper is about

RL="$SMALL --prompts $DATA/prompts.jsonl --reward-model $RUNS/reward-proxy/model \
  --gold $GOLD --gold-prompts $DATA/prompts_gold.jsonl"
THINK="$RL --model $RUNS/sft-think/model"
PLAIN="$RL --model $RUNS/sft-plain/model --think-format plain"

if stage grpo; then
  for seed in $SEEDS; do
    train grpo "grpo-think-s$seed" $THINK --seed "$seed"
    train grpo "grpo-plain-s$seed" $PLAIN --seed "$seed"
  done
fi

if stage dpo; then
  train dpo dpo-think $THINK
  train dpo dpo-plain $PLAIN
fi

# --- 5. RLVR: instructions that a checker verifies

if stage rlvr; then
  train grpo rlvr-plain --preset small-instructions --dtype "$DTYPE" --model "$RUNS/sft-plain/model" \
    --prompts "$DATA/instructions.jsonl"
fi

# --- 6. evaluation: gold reward of one answer to each of 200 prompts, and IFEval

# name_of MODEL: the name of the run that made it, or `instruct` for the model that all start from
name_of() {
  if [ "$1" = "$MODEL" ]; then
    echo instruct
  else
    basename "${1%/model}"
  fi
}

# answer MODEL PROMPTS OUT: one answer to each prompt, with its gold and its proxy reward
answer() {
  python eval_wildbench.py --model "$1" --tasks "$2" --judge experiments/small_judge.py:judge \
    --reward-model "$RUNS/reward-proxy/model" --reward-on response --max-tokens 256 --max-invalid 1 \
    --rollout vllm --dtype "$DTYPE" --out "$3" --resume
}

# ifeval MODEL TEMPERATURE OUT
ifeval() {
  python eval_benchmarks.py ifeval --data "$IFEVAL" --model "$1" --max-tokens 256 --temperature "$2" \
    --rollout vllm --dtype "$DTYPE" --out "$3" --resume
}

if stage evaluate; then
  for model in "$MODEL" "$RUNS"/{sft,grpo,dpo,rlvr}-*/model; do # what is trained
    name=$(name_of "$model")
    answer "$model" "$DATA/prompts_eval.jsonl" "$RUNS/eval-$name"
    ifeval "$model" 0.7 "$RUNS/ifeval-$name"
    case $name in
      instruct | sft-plain | rlvr-plain) ifeval "$model" 0 "$RUNS/ifeval-greedy-$name" ;; # RLVR's number
    esac
  done
fi

# --- 7. samples: answers of the models before and after GRPO to twenty prompts of our own, for notebooks/07_small_model.ipynb

if stage samples; then
  for model in "$MODEL" "$RUNS"/{sft,grpo}-*/model; do
    answer "$model" experiments/small_prompts.jsonl "$RUNS/samples-$(name_of "$model")"
  done
fi

# --- 8. table, curves

if stage table; then
  python -m experiments.compare "$RESULTS"
fi
