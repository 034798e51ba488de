# The checkpoints that the paper's authors publish, evaluated as they are: rows of tables 1 and 3, before anything is trained.
#
# Each is a folder in checkpoints/, or a link to one, with the name of our row: hf download NAME --local-dir checkpoints/ROW
# rows.sh takes its format and limit of tokens from that name. docs/paper.md says where the NAMEs are. reproduce.py leaves out
# the rows without a folder.
set -euo pipefail
. experiments/rows.sh

# --- table 1
row table1/llama3.1-8b-sft-plain-as-released
row table1/llama3.1-8b-sft-think-as-released
row table1/llama3.1-8b-rlhf-as-released
row table1/llama3.1-8b-rlmt-as-released
row table1/qwen2.5-7b-sft-plain-as-released
row table1/qwen2.5-7b-sft-think-as-released
row table1/qwen2.5-7b-rlhf-as-released
row table1/qwen2.5-7b-rlmt-as-released
row table1/llama3.1-8b-instruct-sft-plain-as-released
row table1/llama3.1-8b-instruct-sft-think-as-released
row table1/llama3.1-8b-instruct-rlhf-as-released
row table1/llama3.1-8b-instruct-rlmt-as-released
row table1/qwen2.5-7b-instruct-sft-plain-as-released
row table1/qwen2.5-7b-instruct-sft-think-as-released
row table1/qwen2.5-7b-instruct-rlhf-as-released
row table1/qwen2.5-7b-instruct-rlmt-as-released
row table1/llama3.1-8b-rlhf-zero-as-released
row table1/llama3.1-8b-rlmt-zero-as-released
row table1/qwen2.5-7b-rlhf-zero-as-released
row table1/qwen2.5-7b-rlmt-zero-as-released

# --- table 3
row table3/llama3.1-8b-rlhf-dpo-as-released
row table3/llama3.1-8b-rlmt-dpo-as-released
row table3/llama3.1-8b-rlhf-ppo-as-released
row table3/llama3.1-8b-rlmt-ppo-as-released
row table3/qwen2.5-7b-rlhf-dpo-as-released
row table3/qwen2.5-7b-rlmt-dpo-as-released
row table3/qwen2.5-7b-rlhf-ppo-as-released
row table3/qwen2.5-7b-rlmt-ppo-as-released
row table3/llama3.1-8b-instruct-rlhf-dpo-as-released
row table3/llama3.1-8b-instruct-rlmt-dpo-as-released
row table3/llama3.1-8b-instruct-rlhf-ppo-as-released
row table3/llama3.1-8b-instruct-rlmt-ppo-as-released
row table3/qwen2.5-7b-instruct-rlhf-dpo-as-released
row table3/qwen2.5-7b-instruct-rlmt-dpo-as-released
row table3/qwen2.5-7b-instruct-rlhf-ppo-as-released
row table3/qwen2.5-7b-instruct-rlmt-ppo-as-released
row table3/llama3.1-8b-rlhf-zero-dpo-as-released
row table3/llama3.1-8b-rlmt-zero-dpo-as-released
row table3/llama3.1-8b-rlhf-zero-ppo-as-released
row table3/llama3.1-8b-rlmt-zero-ppo-as-released
row table3/qwen2.5-7b-rlhf-zero-dpo-as-released
row table3/qwen2.5-7b-rlmt-zero-dpo-as-released
row table3/qwen2.5-7b-rlhf-zero-ppo-as-released
row table3/qwen2.5-7b-rlmt-zero-ppo-as-released
