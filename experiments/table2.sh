# Table 2: one model of table 1 beside models of others.
#
# What a block needs (`# needs:`) is trained in table1.sh: run that first.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table2.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
export SEED RESULTS JUDGE_FLAGS
BENCHMARKS="wildbench alpacaeval2 arenahard2 creativewriting3"

# row: table2/llama3.1-8b-instruct-rlmt
# needs: llama3.1-8b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-s$SEED" $BENCHMARKS
