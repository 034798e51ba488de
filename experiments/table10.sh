# Table 10: models of table1.sh beside models of others.
set -euo pipefail
BENCHMARKS="wildbench alpacaeval2 arenahard2 creativewriting3"
. experiments/rows.sh

row table10/llama3.1-8b-rlmt-zero
row table10/qwen2.5-7b-rlmt-zero
row table10/llama3.1-8b-instruct-rlmt
row table10/qwen2.5-7b-instruct-rlmt

# --- models of others
MAX_TOKENS=4096 MODEL=yapeichang/Qwen2.5-7B-BLEUBERI row table10/qwen2.5-7b-bleuberi-released
MAX_TOKENS=4096 MODEL=viswavi/qwen2.5_rlcf row table10/qwen2.5-7b-rlcf-released
