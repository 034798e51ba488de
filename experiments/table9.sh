# Table 9: a model that was trained to reason about mathematics, before and after RLMT, beside models of table 1.
#
# GPU-hours are those that the paper's README reports for an 8B model on H100, scaled by steps; none was measured here.
# data/README.md says how the files in data/ are made.
# What a block needs (`# needs:`) and this file does not have is in table1.sh: run that first.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table9.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${LAUNCH:=accelerate launch --config_file accelerate/8gpu_fsdp2.yaml}"
: "${AS_RELEASED:=}" # --as-released: the values of the paper's released code, where they differ from the paper's
: "${GOLD_FLAGS:=}"  # --gold judge:MODEL --gold-prompts FILE: held-out prompts, measured at every checkpoint
: "${TEMPLATES:=}" # folder with the judges' instructions; evaluate.sh says how it is laid out
export SEED RESULTS JUDGE_FLAGS TEMPLATES
BENCHMARKS="wildbench alpacaeval2 arenahard2 creativewriting3"

# row: table9/llama3.1-8b-rlmt
# needs: llama3.1-8b-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-s$SEED/model" "llama3.1-8b-rlmt-s$SEED" $BENCHMARKS

# row: table9/qwen2.5-7b-rlmt
# needs: qwen2.5-7b-rlmt
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-s$SEED/model" "qwen2.5-7b-rlmt-s$SEED" $BENCHMARKS

# row: table9/llama3.1-8b-instruct-rlmt
# needs: llama3.1-8b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-s$SEED" $BENCHMARKS

# row: table9/qwen2.5-7b-instruct-rlmt
# needs: qwen2.5-7b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlmt-s$SEED/model" \
  "qwen2.5-7b-instruct-rlmt-s$SEED" $BENCHMARKS

# --- models of others, trained to reason about mathematics

# row: table9/r1-distill-llama-8b-released
bash experiments/evaluate.sh deepseek-ai/DeepSeek-R1-Distill-Llama-8B "r1-distill-llama-8b-released-s$SEED" $BENCHMARKS

# row: table9/qwen2.5-7b-simplerl-zoo-released
bash experiments/evaluate.sh hkust-nlp/Qwen-2.5-7B-SimpleRL-Zoo "qwen2.5-7b-simplerl-zoo-released-s$SEED" $BENCHMARKS

# row: table9/r1-distill-qwen-7b-released
bash experiments/evaluate.sh deepseek-ai/DeepSeek-R1-Distill-Qwen-7B "r1-distill-qwen-7b-released-s$SEED" $BENCHMARKS

# row: table9/openthinker2-7b-released
THINK_FORMAT=think bash experiments/evaluate.sh open-thoughts/OpenThinker2-7B \
  "openthinker2-7b-released-s$SEED" $BENCHMARKS

# row: table9/openthinker2-7b-rlmt
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table9/openthinker2-7b-rlmt $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/openthinker2-7b-rlmt-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/openthinker2-7b-rlmt-s$SEED/model" "openthinker2-7b-rlmt-s$SEED" $BENCHMARKS
