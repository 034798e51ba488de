# Table 8: four more benchmarks for the models of tables 1 and 3.
#
# What a block needs (`# needs:`) is trained in table1.sh and table3.sh: run those first.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table8.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${TEMPLATES:=}" # folder with the judges' instructions; evaluate.sh says how it is laid out
export SEED RESULTS JUDGE_FLAGS TEMPLATES
BENCHMARKS="ifeval wildbench-g math500 zebralogic"

# --- Llama-3.1-8B, warm-started

# row: table8/llama3.1-8b-sft-plain
# needs: llama3.1-8b-sft-plain
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-sft-plain-s$SEED/model" \
  "llama3.1-8b-sft-plain-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-sft-think
# needs: llama3.1-8b-sft-think
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" "llama3.1-8b-sft-think-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-rlhf-dpo
# needs: llama3.1-8b-rlhf-dpo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-dpo-s$SEED/model" \
  "llama3.1-8b-rlhf-dpo-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-rlmt-dpo
# needs: llama3.1-8b-rlmt-dpo
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-dpo-s$SEED/model" "llama3.1-8b-rlmt-dpo-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-rlhf-ppo
# needs: llama3.1-8b-rlhf-ppo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-ppo-s$SEED/model" \
  "llama3.1-8b-rlhf-ppo-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-rlmt-ppo
# needs: llama3.1-8b-rlmt-ppo
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-ppo-s$SEED/model" "llama3.1-8b-rlmt-ppo-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-rlhf
# needs: llama3.1-8b-rlhf
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-s$SEED/model" \
  "llama3.1-8b-rlhf-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-rlmt
# needs: llama3.1-8b-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-s$SEED/model" "llama3.1-8b-rlmt-s$SEED" $BENCHMARKS

# --- Qwen2.5-7B, warm-started

# row: table8/qwen2.5-7b-sft-plain
# needs: qwen2.5-7b-sft-plain
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-sft-plain-s$SEED/model" \
  "qwen2.5-7b-sft-plain-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-sft-think
# needs: qwen2.5-7b-sft-think
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-sft-think-s$SEED/model" "qwen2.5-7b-sft-think-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-rlhf-dpo
# needs: qwen2.5-7b-rlhf-dpo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-dpo-s$SEED/model" \
  "qwen2.5-7b-rlhf-dpo-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-rlmt-dpo
# needs: qwen2.5-7b-rlmt-dpo
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-dpo-s$SEED/model" "qwen2.5-7b-rlmt-dpo-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-rlhf-ppo
# needs: qwen2.5-7b-rlhf-ppo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-ppo-s$SEED/model" \
  "qwen2.5-7b-rlhf-ppo-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-rlmt-ppo
# needs: qwen2.5-7b-rlmt-ppo
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-ppo-s$SEED/model" "qwen2.5-7b-rlmt-ppo-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-rlhf
# needs: qwen2.5-7b-rlhf
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-s$SEED/model" \
  "qwen2.5-7b-rlhf-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-rlmt
# needs: qwen2.5-7b-rlmt
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-s$SEED/model" "qwen2.5-7b-rlmt-s$SEED" $BENCHMARKS

# --- Llama-3.1-8B-Instruct

# row: table8/llama3.1-8b-instruct-released
MAX_TOKENS=4096 bash experiments/evaluate.sh meta-llama/Llama-3.1-8B-Instruct \
  "llama3.1-8b-instruct-released-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-instruct-sft-plain
# needs: llama3.1-8b-instruct-sft-plain
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-sft-plain-s$SEED/model" \
  "llama3.1-8b-instruct-sft-plain-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-instruct-sft-think
# needs: llama3.1-8b-instruct-sft-think
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-sft-think-s$SEED/model" \
  "llama3.1-8b-instruct-sft-think-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-instruct-rlhf-dpo
# needs: llama3.1-8b-instruct-rlhf-dpo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlhf-dpo-s$SEED/model" \
  "llama3.1-8b-instruct-rlhf-dpo-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-instruct-rlmt-dpo
# needs: llama3.1-8b-instruct-rlmt-dpo
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-dpo-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-dpo-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-instruct-rlhf-ppo
# needs: llama3.1-8b-instruct-rlhf-ppo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlhf-ppo-s$SEED/model" \
  "llama3.1-8b-instruct-rlhf-ppo-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-instruct-rlmt-ppo
# needs: llama3.1-8b-instruct-rlmt-ppo
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-ppo-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-ppo-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-instruct-rlhf
# needs: llama3.1-8b-instruct-rlhf
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlhf-s$SEED/model" \
  "llama3.1-8b-instruct-rlhf-s$SEED" $BENCHMARKS

# row: table8/llama3.1-8b-instruct-rlmt
# needs: llama3.1-8b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-s$SEED" $BENCHMARKS

# --- Qwen2.5-7B-Instruct

# row: table8/qwen2.5-7b-instruct-released
MAX_TOKENS=4096 bash experiments/evaluate.sh Qwen/Qwen2.5-7B-Instruct \
  "qwen2.5-7b-instruct-released-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-instruct-sft-plain
# needs: qwen2.5-7b-instruct-sft-plain
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-sft-plain-s$SEED/model" \
  "qwen2.5-7b-instruct-sft-plain-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-instruct-sft-think
# needs: qwen2.5-7b-instruct-sft-think
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-sft-think-s$SEED/model" \
  "qwen2.5-7b-instruct-sft-think-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-instruct-rlhf-dpo
# needs: qwen2.5-7b-instruct-rlhf-dpo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlhf-dpo-s$SEED/model" \
  "qwen2.5-7b-instruct-rlhf-dpo-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-instruct-rlmt-dpo
# needs: qwen2.5-7b-instruct-rlmt-dpo
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlmt-dpo-s$SEED/model" \
  "qwen2.5-7b-instruct-rlmt-dpo-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-instruct-rlhf-ppo
# needs: qwen2.5-7b-instruct-rlhf-ppo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlhf-ppo-s$SEED/model" \
  "qwen2.5-7b-instruct-rlhf-ppo-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-instruct-rlmt-ppo
# needs: qwen2.5-7b-instruct-rlmt-ppo
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlmt-ppo-s$SEED/model" \
  "qwen2.5-7b-instruct-rlmt-ppo-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-instruct-rlhf
# needs: qwen2.5-7b-instruct-rlhf
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlhf-s$SEED/model" \
  "qwen2.5-7b-instruct-rlhf-s$SEED" $BENCHMARKS

# row: table8/qwen2.5-7b-instruct-rlmt
# needs: qwen2.5-7b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlmt-s$SEED/model" \
  "qwen2.5-7b-instruct-rlmt-s$SEED" $BENCHMARKS
