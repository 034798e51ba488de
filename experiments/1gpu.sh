# One card: warm start and GRPO of a small model, with thinking (rlmt) and without (rlhf), and benchmarks that need no judge.
#
#   bash experiments/1gpu.sh                                        # Qwen2.5-1.5B on 24 GB
#   CARD=80gb MODEL=llama3.2-1b bash experiments/1gpu.sh            # or qwen2.5-0.5b
#   DRY_RUN=--dry-run bash experiments/1gpu.sh                      # looks for all inputs; GiB of the warm starts
#   BENCHMARKS= bash experiments/1gpu.sh                            # without evaluations
#
# An interrupted run goes on with the same command. README.md, "A run on one GPU", has the commands that make its inputs.
# Nothing of it has run on a GPU yet: docs/gpu.md.
#
set -euo pipefail
# Settings. To copy single commands, paste these lines into your shell before.
: "${CARD:=24gb}" "${MODEL:=qwen2.5-1.5b}"
: "${SEED:=0}" "${RESULTS:=results}"
: "${TRACES:=data/traces.jsonl}" "${PROMPTS:=data/wildchat_if.jsonl}"
: "${BENCHMARKS=popqa ifbench mmlu_redux}" # names that evaluate.sh knows; the judges of the others cost money
: "${REPORT_TO:=none}"                     # or wandb, trackio, tensorboard
: "${DRY_RUN:=}"
LAUNCH="accelerate launch --config_file accelerate/1gpu.yaml"
export SEED RESULTS

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
inputs="$TRACES $PROMPTS"
if [[ " $BENCHMARKS " == *" mmlu_redux "* ]]; then
  inputs+=" data/mmlu_redux"
fi
missing=""
for input in $inputs; do
  if [[ $input == data/* && ! -e ${input%%:*} ]]; then # other names may be on the hub
    missing+=" $input"
  fi
done
if [ -n "$missing" ]; then
  echo "error: missing:$missing; README.md, \"A run on one GPU\", has the commands that make them" >&2
  exit 2
fi
# hub data sets, NLTK's data, judges, lengths: a dry run with the model from which all start. It needs no chat template then
MODEL_FLAGS="${MODEL_FLAGS:-} --dry-run" THINK_FORMAT=zero_think evaluate "$base" "$CARD-$MODEL-dry-run"

# --- Warm start, with thinking and without

$LAUNCH train_sft_warmstart.py $SFT --model "$base" --traces "$TRACES" --report-to "$REPORT_TO" $DRY_RUN \
  --seed "$SEED" --out "$RESULTS/$CARD-$MODEL-sft-think-s$SEED" --resume

$LAUNCH train_sft_warmstart.py $SFT --model "$base" --think-format plain --traces "$TRACES" --report-to "$REPORT_TO" $DRY_RUN \
  --seed "$SEED" --out "$RESULTS/$CARD-$MODEL-sft-plain-s$SEED" --resume

if [ -n "$DRY_RUN" ]; then exit; fi # what follows starts from the models of these two

# --- Benchmarks of both, before GRPO. Without thinking 4096 tokens, as in the paper

evaluate "$RESULTS/$CARD-$MODEL-sft-think-s$SEED/model" "$CARD-$MODEL-sft-think-s$SEED"
MAX_TOKENS=4096 evaluate "$RESULTS/$CARD-$MODEL-sft-plain-s$SEED/model" "$CARD-$MODEL-sft-plain-s$SEED"

# --- GRPO from them, with LoRA

$LAUNCH train_grpo.py --preset "$CARD" --prompts "$PROMPTS" --report-to "$REPORT_TO" \
  --model "$RESULTS/$CARD-$MODEL-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/$CARD-$MODEL-rlmt-s$SEED" --resume

$LAUNCH train_grpo.py --preset "$CARD" --think-format plain --prompts "$PROMPTS" --report-to "$REPORT_TO" \
  --model "$RESULTS/$CARD-$MODEL-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/$CARD-$MODEL-rlhf-s$SEED" --resume

# --- The same benchmarks after it

evaluate "$RESULTS/$CARD-$MODEL-rlmt-s$SEED/model" "$CARD-$MODEL-rlmt-s$SEED"
MAX_TOKENS=4096 evaluate "$RESULTS/$CARD-$MODEL-rlhf-s$SEED/model" "$CARD-$MODEL-rlhf-s$SEED"
