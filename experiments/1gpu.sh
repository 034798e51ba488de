# One card: warm start and GRPO of a small model, with thinking (rlmt) and without (rlhf), and benchmarks that need no judge.
#
#   bash experiments/1gpu.sh                                        # Qwen2.5-1.5B on 24 GB
#   CARD=80gb MODEL=llama3.2-1b bash experiments/1gpu.sh            # or qwen2.5-0.5b
#   DRY_RUN=--dry-run bash experiments/1gpu.sh                      # what the warm starts read and how many GiB they take
#
# An interrupted run goes on with the same command. data/README.md says how the files in data/ are made: the two below, for the
# benchmarks data/mmlu_redux, and NLTK's data. Nothing of it has run on a GPU yet: docs/gpu.md.
#
set -euo pipefail
# Settings. To copy single commands, paste these lines into your shell before.
: "${CARD:=24gb}" "${MODEL:=qwen2.5-1.5b}"
: "${SEED:=0}" "${RESULTS:=results}"
: "${TRACES:=data/traces.jsonl}" "${PROMPTS:=data/wildchat_if.jsonl}"
: "${BENCHMARKS:=popqa ifbench mmlu_redux}" # names that evaluate.sh knows; the judges of the others cost money
: "${REPORT_TO:=none}"                      # or wandb, trackio, tensorboard
: "${DRY_RUN:=}"
LAUNCH="accelerate launch --config_file accelerate/1gpu.yaml"
export SEED RESULTS

# --- Warm start, with thinking and without

$LAUNCH train_sft_warmstart.py --preset "$CARD/$MODEL-sft-think" --traces "$TRACES" --report-to "$REPORT_TO" $DRY_RUN \
  --seed "$SEED" --out "$RESULTS/$CARD-$MODEL-sft-think-s$SEED" --resume

$LAUNCH train_sft_warmstart.py --preset "$CARD/$MODEL-sft-plain" --traces "$TRACES" --report-to "$REPORT_TO" $DRY_RUN \
  --seed "$SEED" --out "$RESULTS/$CARD-$MODEL-sft-plain-s$SEED" --resume

if [ -n "$DRY_RUN" ]; then exit; fi # what follows starts from the models of these two

# --- Benchmarks of both, before GRPO: what they miss is said here. Without thinking 4096 tokens, as in the paper

bash experiments/evaluate.sh "$RESULTS/$CARD-$MODEL-sft-think-s$SEED/model" "$CARD-$MODEL-sft-think-s$SEED" $BENCHMARKS
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/$CARD-$MODEL-sft-plain-s$SEED/model" "$CARD-$MODEL-sft-plain-s$SEED" $BENCHMARKS

# --- GRPO from them, with LoRA

$LAUNCH train_grpo.py --preset "$CARD/$MODEL-rlmt" --prompts "$PROMPTS" --report-to "$REPORT_TO" \
  --model "$RESULTS/$CARD-$MODEL-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/$CARD-$MODEL-rlmt-s$SEED" --resume

$LAUNCH train_grpo.py --preset "$CARD/$MODEL-rlhf" --prompts "$PROMPTS" --report-to "$REPORT_TO" \
  --model "$RESULTS/$CARD-$MODEL-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/$CARD-$MODEL-rlhf-s$SEED" --resume

# --- The same benchmarks after it

bash experiments/evaluate.sh "$RESULTS/$CARD-$MODEL-rlmt-s$SEED/model" "$CARD-$MODEL-rlmt-s$SEED" $BENCHMARKS
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/$CARD-$MODEL-rlhf-s$SEED/model" "$CARD-$MODEL-rlhf-s$SEED" $BENCHMARKS
