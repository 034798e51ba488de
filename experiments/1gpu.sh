# One card: warm start and GRPO of a small model, with thinking (rlmt) and without (rlhf), and benchmarks that need no judge.
# Reward models that nothing is trained on score the answers to WildBench, and along GRPO (gold) those to held-out prompts.
#
#   bash experiments/1gpu.sh                                        # Qwen2.5-1.5B on 24 GB
#   CARD=80gb MODEL=llama3.2-1b bash experiments/1gpu.sh            # or qwen2.5-0.5b
#   DRY_RUN=1 bash experiments/1gpu.sh                              # its checks alone, with the GiB of each stage
#   TRACES=MY.jsonl PROMPTS=MY.csv GOLD_FLAGS= bash experiments/1gpu.sh
#   BENCHMARKS= bash experiments/1gpu.sh                            # without evaluations
#   GRPO_FLAGS="--steps 60" GOLD_FLAGS="--gold judge:MODEL --gold-prompts FILE" bash experiments/1gpu.sh
#
# An interrupted run goes on with the same command. README.md has the commands that make its inputs.
# Nothing of it has run on a GPU yet: docs/gpu.md.
#
set -euo pipefail
# Settings. To copy single commands, paste these lines into your shell before.
: "${CARD:=24gb}" "${MODEL:=qwen2.5-1.5b}"
: "${SEED:=0}" "${RESULTS:=results}"
: "${TRACES:=data/traces.jsonl}" "${PROMPTS:=data/wildchat_if.jsonl}"
: "${BENCHMARKS=wildbench-rm ifeval popqa ifbench mmlu_redux}" # names that evaluate.sh knows; the judges of the others cost money
: "${GRPO_FLAGS:=}" # of both runs of GRPO, as are these; empty: no gold
: "${GOLD_FLAGS=--gold Skywork/Skywork-Reward-V2-Llama-3.2-1B --gold-prompts data/wildchat_if_val.jsonl}"
: "${REPORT_TO:=none}"                     # or wandb, trackio, tensorboard
: "${DRY_RUN:=}"
export SEED RESULTS

# train SCRIPT NAME FLAGS...: trains $RUN-NAME-s$SEED
RUN=$CARD-$MODEL
train() {
  python "train_$1.py" "${@:3}" --report-to "$REPORT_TO" --seed "$SEED" --out "$RESULTS/$RUN-$2-s$SEED" --resume
}

# evaluate MODEL NAME: all of $BENCHMARKS, if there are any
evaluate() {
  if [ -n "$BENCHMARKS" ]; then
    bash experiments/evaluate.sh "$1" "$2" $BENCHMARKS
  fi
}

# --- The inputs of every stage, before anything is trained

case $MODEL in
  qwen2.5-0.5b) base=Qwen/Qwen2.5-0.5B ;;
  qwen2.5-1.5b) base=Qwen/Qwen2.5-1.5B ;;
  llama3.2-1b) base=meta-llama/Llama-3.2-1B ;;
  *) echo "error: MODEL=$MODEL: use qwen2.5-0.5b, qwen2.5-1.5b or llama3.2-1b, whose sizes fit these cards" >&2 && exit 2 ;;
esac
case $CARD/$MODEL in # how the warm start fits the card
  24gb/qwen2.5-0.5b) SFT="--learning-rate 1e-5" ;;
  24gb/llama3.2-1b) SFT="--optim adamw_8bit --learning-rate 1e-5" ;;
  *) SFT="--preset $CARD" ;;
esac
inputs=("$TRACES" "$PROMPTS" $GOLD_FLAGS)
if [[ $BENCHMARKS == *wildbench* ]]; then
  inputs+=(data/wildbench.jsonl)
fi
missing=()
for input in "${inputs[@]}"; do
  if [[ $input == data/* && ! -e ${input%%:*} ]]; then # other names may be on the hub
    missing+=("$input")
  fi
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "error: missing: ${missing[*]}; README.md has the commands that make them" >&2
  exit 2
fi
GRPO=(--preset "$CARD" --prompts "$PROMPTS" $GRPO_FLAGS $GOLD_FLAGS)
# dry runs with the model from which all start: forms of the data, memory, hub data sets, NLTK's data, lengths. It needs no
# chat template then
train sft_warmstart dry-run $SFT --model "$base" --traces "$TRACES" --dry-run
train grpo dry-run "${GRPO[@]}" --model "$base" --dry-run
MODEL_FLAGS="${MODEL_FLAGS:-} --dry-run" THINK_FORMAT=zero_think evaluate "$base" "$RUN-dry-run"
if [ -n "$DRY_RUN" ]; then
  exit
fi

THINK=$RUN-sft-think-s$SEED
PLAIN=$RUN-sft-plain-s$SEED

# --- Warm start, with thinking and without

train sft_warmstart sft-think $SFT --model "$base" --traces "$TRACES"
train sft_warmstart sft-plain $SFT --model "$base" --traces "$TRACES" --think-format plain

# --- Benchmarks of both, before GRPO. Without thinking 4096 tokens, as in the paper

evaluate "$RESULTS/$THINK/model" "$THINK"
MAX_TOKENS=4096 evaluate "$RESULTS/$PLAIN/model" "$PLAIN"

# --- GRPO from them, with LoRA

train grpo rlmt "${GRPO[@]}" --model "$RESULTS/$THINK/model"
train grpo rlhf "${GRPO[@]}" --model "$RESULTS/$PLAIN/model" --think-format plain

# --- The same benchmarks after it

evaluate "$RESULTS/$RUN-rlmt-s$SEED/model" "$RUN-rlmt-s$SEED"
MAX_TOKENS=4096 evaluate "$RESULTS/$RUN-rlhf-s$SEED/model" "$RUN-rlhf-s$SEED"
