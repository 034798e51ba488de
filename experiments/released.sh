# The checkpoints that the paper's authors publish, evaluated as they are: rows of tables 1 and 3, before anything is trained.
#
# Each is a folder in checkpoints/, or a link to one, with the name of our row: hf download NAME --local-dir checkpoints/ROW
# docs/paper.md says where the names are. reproduce.py leaves out the rows without a folder.
set -euo pipefail
. experiments/rows.sh

# --- table 1
MAX_TOKENS=4096 THINK_FORMAT=plain row table1/llama3.1-8b-sft-plain-as-released
THINK_FORMAT=think row table1/llama3.1-8b-sft-think-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table1/llama3.1-8b-rlhf-as-released
THINK_FORMAT=think row table1/llama3.1-8b-rlmt-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table1/qwen2.5-7b-sft-plain-as-released
THINK_FORMAT=think row table1/qwen2.5-7b-sft-think-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table1/qwen2.5-7b-rlhf-as-released
THINK_FORMAT=think row table1/qwen2.5-7b-rlmt-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table1/llama3.1-8b-instruct-sft-plain-as-released
THINK_FORMAT=think row table1/llama3.1-8b-instruct-sft-think-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table1/llama3.1-8b-instruct-rlhf-as-released
THINK_FORMAT=think row table1/llama3.1-8b-instruct-rlmt-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table1/qwen2.5-7b-instruct-sft-plain-as-released
THINK_FORMAT=think row table1/qwen2.5-7b-instruct-sft-think-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table1/qwen2.5-7b-instruct-rlhf-as-released
THINK_FORMAT=think row table1/qwen2.5-7b-instruct-rlmt-as-released
THINK_FORMAT=zero_plain row table1/llama3.1-8b-rlhf-zero-as-released
THINK_FORMAT=zero_think row table1/llama3.1-8b-rlmt-zero-as-released
THINK_FORMAT=zero_plain row table1/qwen2.5-7b-rlhf-zero-as-released
THINK_FORMAT=zero_think row table1/qwen2.5-7b-rlmt-zero-as-released

# --- table 3
MAX_TOKENS=4096 THINK_FORMAT=plain row table3/llama3.1-8b-rlhf-dpo-as-released
THINK_FORMAT=think row table3/llama3.1-8b-rlmt-dpo-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table3/llama3.1-8b-rlhf-ppo-as-released
THINK_FORMAT=think row table3/llama3.1-8b-rlmt-ppo-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table3/qwen2.5-7b-rlhf-dpo-as-released
THINK_FORMAT=think row table3/qwen2.5-7b-rlmt-dpo-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table3/qwen2.5-7b-rlhf-ppo-as-released
THINK_FORMAT=think row table3/qwen2.5-7b-rlmt-ppo-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table3/llama3.1-8b-instruct-rlhf-dpo-as-released
THINK_FORMAT=think row table3/llama3.1-8b-instruct-rlmt-dpo-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table3/llama3.1-8b-instruct-rlhf-ppo-as-released
THINK_FORMAT=think row table3/llama3.1-8b-instruct-rlmt-ppo-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table3/qwen2.5-7b-instruct-rlhf-dpo-as-released
THINK_FORMAT=think row table3/qwen2.5-7b-instruct-rlmt-dpo-as-released
MAX_TOKENS=4096 THINK_FORMAT=plain row table3/qwen2.5-7b-instruct-rlhf-ppo-as-released
THINK_FORMAT=think row table3/qwen2.5-7b-instruct-rlmt-ppo-as-released
THINK_FORMAT=zero_plain row table3/llama3.1-8b-rlhf-zero-dpo-as-released
THINK_FORMAT=zero_think row table3/llama3.1-8b-rlmt-zero-dpo-as-released
THINK_FORMAT=zero_plain row table3/llama3.1-8b-rlhf-zero-ppo-as-released
THINK_FORMAT=zero_think row table3/llama3.1-8b-rlmt-zero-ppo-as-released
THINK_FORMAT=zero_plain row table3/qwen2.5-7b-rlhf-zero-dpo-as-released
THINK_FORMAT=zero_think row table3/qwen2.5-7b-rlmt-zero-dpo-as-released
THINK_FORMAT=zero_plain row table3/qwen2.5-7b-rlhf-zero-ppo-as-released
THINK_FORMAT=zero_think row table3/qwen2.5-7b-rlmt-zero-ppo-as-released
