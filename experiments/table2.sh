# Table 2: one model of table 1 beside models of others.
#
# What a block needs (`# needs:`) is trained in table1.sh: run that first.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table2.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${LARGE_MODEL_FLAGS:=--tensor-parallel 4}" # of 70B and 72B, on 80 GB; or --model-url URL of an endpoint that serves them
: "${TEMPLATES:=}" # folder with the judges' instructions; evaluate.sh says how it is laid out
export SEED RESULTS JUDGE_FLAGS TEMPLATES
BENCHMARKS="wildbench alpacaeval2 arenahard2 creativewriting3"

# row: table2/llama3.1-8b-instruct-rlmt
# needs: llama3.1-8b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-s$SEED" $BENCHMARKS

# --- models of others

# row: table2/llama3.1-70b-instruct-released
MAX_TOKENS=4096 MODEL_FLAGS=$LARGE_MODEL_FLAGS bash experiments/evaluate.sh meta-llama/Llama-3.1-70B-Instruct \
  "llama3.1-70b-instruct-released-s$SEED" $BENCHMARKS

# row: table2/qwen2.5-72b-instruct-released
MAX_TOKENS=4096 MODEL_FLAGS=$LARGE_MODEL_FLAGS bash experiments/evaluate.sh Qwen/Qwen2.5-72B-Instruct \
  "qwen2.5-72b-instruct-released-s$SEED" $BENCHMARKS

# row: table2/gpt-4o-released
MAX_TOKENS=4096 MODEL_FLAGS="--model-url https://api.openai.com/v1" bash experiments/evaluate.sh gpt-4o \
  "gpt-4o-released-s$SEED" $BENCHMARKS
