# Table 8: four more benchmarks for the models of table1.sh and table3.sh.
set -euo pipefail
BENCHMARKS="ifeval wildbench-g math500 zebralogic"
. experiments/rows.sh

# --- Llama-3.1-8B, warm-started
row table8/llama3.1-8b-sft-plain
row table8/llama3.1-8b-sft-think
row table8/llama3.1-8b-rlhf-dpo
row table8/llama3.1-8b-rlmt-dpo
row table8/llama3.1-8b-rlhf-ppo
row table8/llama3.1-8b-rlmt-ppo
row table8/llama3.1-8b-rlhf
row table8/llama3.1-8b-rlmt

# --- Qwen2.5-7B, warm-started
row table8/qwen2.5-7b-sft-plain
row table8/qwen2.5-7b-sft-think
row table8/qwen2.5-7b-rlhf-dpo
row table8/qwen2.5-7b-rlmt-dpo
row table8/qwen2.5-7b-rlhf-ppo
row table8/qwen2.5-7b-rlmt-ppo
row table8/qwen2.5-7b-rlhf
row table8/qwen2.5-7b-rlmt

# --- Llama-3.1-8B-Instruct
MAX_TOKENS=4096 MODEL=meta-llama/Llama-3.1-8B-Instruct row table8/llama3.1-8b-instruct-released
row table8/llama3.1-8b-instruct-sft-plain
row table8/llama3.1-8b-instruct-sft-think
row table8/llama3.1-8b-instruct-rlhf-dpo
row table8/llama3.1-8b-instruct-rlmt-dpo
row table8/llama3.1-8b-instruct-rlhf-ppo
row table8/llama3.1-8b-instruct-rlmt-ppo
row table8/llama3.1-8b-instruct-rlhf
row table8/llama3.1-8b-instruct-rlmt

# --- Qwen2.5-7B-Instruct
MAX_TOKENS=4096 MODEL=Qwen/Qwen2.5-7B-Instruct row table8/qwen2.5-7b-instruct-released
row table8/qwen2.5-7b-instruct-sft-plain
row table8/qwen2.5-7b-instruct-sft-think
row table8/qwen2.5-7b-instruct-rlhf-dpo
row table8/qwen2.5-7b-instruct-rlmt-dpo
row table8/qwen2.5-7b-instruct-rlhf-ppo
row table8/qwen2.5-7b-instruct-rlmt-ppo
row table8/qwen2.5-7b-instruct-rlhf
row table8/qwen2.5-7b-instruct-rlmt
