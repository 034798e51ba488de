# Table 10: models of table 1 beside models of others.
#
# What a block needs (`# needs:`) is trained in table1.sh: run that first.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table10.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${TEMPLATES:=}" # folder with the judges' instructions; evaluate.sh says how it is laid out
export SEED RESULTS JUDGE_FLAGS TEMPLATES
BENCHMARKS="wildbench alpacaeval2 arenahard2 creativewriting3"

# row: table10/llama3.1-8b-rlmt-zero
# needs: llama3.1-8b-rlmt-zero
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-zero-s$SEED/model" "llama3.1-8b-rlmt-zero-s$SEED" $BENCHMARKS

# row: table10/qwen2.5-7b-rlmt-zero
# needs: qwen2.5-7b-rlmt-zero
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-zero-s$SEED/model" "qwen2.5-7b-rlmt-zero-s$SEED" $BENCHMARKS

# row: table10/llama3.1-8b-instruct-rlmt
# needs: llama3.1-8b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-s$SEED" $BENCHMARKS

# row: table10/qwen2.5-7b-instruct-rlmt
# needs: qwen2.5-7b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlmt-s$SEED/model" \
  "qwen2.5-7b-instruct-rlmt-s$SEED" $BENCHMARKS

# --- models of others

# row: table10/qwen2.5-7b-bleuberi-released
MAX_TOKENS=4096 bash experiments/evaluate.sh yapeichang/Qwen2.5-7B-BLEUBERI "qwen2.5-7b-bleuberi-released-s$SEED" $BENCHMARKS

# row: table10/qwen2.5-7b-rlcf-released
MAX_TOKENS=4096 bash experiments/evaluate.sh viswavi/qwen2.5_rlcf "qwen2.5-7b-rlcf-released-s$SEED" $BENCHMARKS
