# Table 3: DPO and PPO, from the warm starts of table1.sh; two algorithms beside GRPO.
#
# The paper's README reports about 8 H100-hours for DPO, without the sampling, and 62 for PPO; none was measured here.
set -euo pipefail
. experiments/rows.sh

# --- Llama-3.1-8B, warm-started
row table3/llama3.1-8b-sft-plain as table1/llama3.1-8b-sft-plain
row table3/llama3.1-8b-sft-think as table1/llama3.1-8b-sft-think
row table3/llama3.1-8b-rlhf-dpo from llama3.1-8b-sft-plain dpo --preset paper$AS_RELEASED --think-format plain
row table3/llama3.1-8b-rlmt-dpo from llama3.1-8b-sft-think dpo --preset paper$AS_RELEASED
row table3/llama3.1-8b-rlhf-ppo from llama3.1-8b-sft-plain ppo --preset paper$AS_RELEASED --think-format plain
row table3/llama3.1-8b-rlmt-ppo from llama3.1-8b-sft-think ppo --preset paper$AS_RELEASED

# --- Qwen2.5-7B, warm-started
row table3/qwen2.5-7b-sft-plain as table1/qwen2.5-7b-sft-plain
row table3/qwen2.5-7b-sft-think as table1/qwen2.5-7b-sft-think
row table3/qwen2.5-7b-rlhf-dpo from qwen2.5-7b-sft-plain dpo --preset paper$AS_RELEASED --think-format plain
row table3/qwen2.5-7b-rlmt-dpo from qwen2.5-7b-sft-think dpo --preset paper$AS_RELEASED
row table3/qwen2.5-7b-rlhf-ppo from qwen2.5-7b-sft-plain ppo --preset paper --think-format plain
row table3/qwen2.5-7b-rlmt-ppo from qwen2.5-7b-sft-think ppo --preset paper

# --- Llama-3.1-8B-Instruct
row table3/llama3.1-8b-instruct-released as table1/llama3.1-8b-instruct-released
row table3/llama3.1-8b-instruct-sft-plain as table1/llama3.1-8b-instruct-sft-plain
row table3/llama3.1-8b-instruct-sft-think as table1/llama3.1-8b-instruct-sft-think
row table3/llama3.1-8b-instruct-rlhf-dpo from llama3.1-8b-instruct-sft-plain dpo --preset paper$AS_RELEASED --think-format plain
row table3/llama3.1-8b-instruct-rlmt-dpo from llama3.1-8b-instruct-sft-think dpo --preset paper$AS_RELEASED
row table3/llama3.1-8b-instruct-rlhf-ppo from llama3.1-8b-instruct-sft-plain ppo --preset paper-instruct --think-format plain
row table3/llama3.1-8b-instruct-rlmt-ppo from llama3.1-8b-instruct-sft-think ppo --preset paper-instruct

# --- Qwen2.5-7B-Instruct
row table3/qwen2.5-7b-instruct-released as table1/qwen2.5-7b-instruct-released
row table3/qwen2.5-7b-instruct-sft-plain as table1/qwen2.5-7b-instruct-sft-plain
row table3/qwen2.5-7b-instruct-sft-think as table1/qwen2.5-7b-instruct-sft-think
row table3/qwen2.5-7b-instruct-rlhf-dpo from qwen2.5-7b-instruct-sft-plain dpo --preset paper$AS_RELEASED --think-format plain
row table3/qwen2.5-7b-instruct-rlmt-dpo from qwen2.5-7b-instruct-sft-think dpo --preset paper$AS_RELEASED
row table3/qwen2.5-7b-instruct-rlhf-ppo from qwen2.5-7b-instruct-sft-plain ppo --preset paper-instruct --think-format plain
row table3/qwen2.5-7b-instruct-rlmt-ppo from qwen2.5-7b-instruct-sft-think ppo --preset paper-instruct

# --- Llama-3.1-8B, Zero: an instruction instead of SFT
row table3/llama3.1-8b-prompted-plain as table1/llama3.1-8b-prompted-plain
row table3/llama3.1-8b-prompted-think as table1/llama3.1-8b-prompted-think
row table3/llama3.1-8b-rlhf-zero-dpo dpo --preset paper$AS_RELEASED --model meta-llama/Llama-3.1-8B --think-format zero_plain
row table3/llama3.1-8b-rlmt-zero-dpo dpo --preset paper$AS_RELEASED --model meta-llama/Llama-3.1-8B --think-format zero_think
row table3/llama3.1-8b-rlhf-zero-ppo ppo --preset paper-zero --model meta-llama/Llama-3.1-8B --think-format zero_plain
row table3/llama3.1-8b-rlmt-zero-ppo ppo --preset paper-zero --model meta-llama/Llama-3.1-8B

# --- Qwen2.5-7B, Zero: an instruction instead of SFT
row table3/qwen2.5-7b-prompted-plain as table1/qwen2.5-7b-prompted-plain
row table3/qwen2.5-7b-prompted-think as table1/qwen2.5-7b-prompted-think
row table3/qwen2.5-7b-rlhf-zero-dpo dpo --preset paper$AS_RELEASED --model Qwen/Qwen2.5-7B --think-format zero_plain
row table3/qwen2.5-7b-rlmt-zero-dpo dpo --preset paper$AS_RELEASED --model Qwen/Qwen2.5-7B --think-format zero_think
row table3/qwen2.5-7b-rlhf-zero-ppo ppo --preset paper-zero --model Qwen/Qwen2.5-7B --think-format zero_plain
row table3/qwen2.5-7b-rlmt-zero-ppo ppo --preset paper-zero --model Qwen/Qwen2.5-7B
