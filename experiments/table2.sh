# Table 2: one model of table 1 beside models of others. What is trained in table1.sh must be there.
set -euo pipefail
: "${LARGE_MODEL_FLAGS:=--tensor-parallel 4}" # of 70B and 72B, on 80 GB; or --model-url URL of an endpoint that serves them
BENCHMARKS="wildbench alpacaeval2 arenahard2 creativewriting3"
. experiments/rows.sh

row table2/llama3.1-8b-instruct-rlmt

# --- models of others
MAX_TOKENS=4096 MODEL_FLAGS=$LARGE_MODEL_FLAGS MODEL=meta-llama/Llama-3.1-70B-Instruct row table2/llama3.1-70b-instruct-released
MAX_TOKENS=4096 MODEL_FLAGS=$LARGE_MODEL_FLAGS MODEL=Qwen/Qwen2.5-72B-Instruct row table2/qwen2.5-72b-instruct-released
MAX_TOKENS=4096 MODEL_FLAGS="--model-url https://api.openai.com/v1" MODEL=gpt-4o row table2/gpt-4o-released
