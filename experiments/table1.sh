# Table 1: SFT, then GRPO, with thinking (rlmt) and without (rlhf), on seven benchmarks.
#
# The paper's README reports about 20 H100-hours for an 8B model's SFT and 62 for its GRPO, scaled by steps; none was measured here.
# data/README.md says how the files in data/ are made. experiments/rows.sh says what a line means, and which settings there are:
# SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table1.sh
set -euo pipefail
. experiments/rows.sh
# Three rows have another batch and sampling in the released configs than the row they are compared with
OTHER_BATCH=${AS_RELEASED:+--prompts-per-step 128 --updates-per-rollout 2 --steps 116 --temperature 0.8 --top-p 0.95}

# --- Llama-3.1-8B, warm-started
row table1/llama3.1-8b-sft-plain sft --model meta-llama/Llama-3.1-8B --think-format plain
row table1/llama3.1-8b-sft-think sft --model meta-llama/Llama-3.1-8B
row table1/llama3.1-8b-rlhf from llama3.1-8b-sft-plain grpo --preset paper$AS_RELEASED --think-format plain
row table1/llama3.1-8b-rlmt from llama3.1-8b-sft-think grpo --preset paper$AS_RELEASED

# --- Qwen2.5-7B, warm-started
row table1/qwen2.5-7b-sft-plain sft --model Qwen/Qwen2.5-7B --think-format plain ${AS_RELEASED:+--batch-size 8}
row table1/qwen2.5-7b-sft-think sft --model Qwen/Qwen2.5-7B ${AS_RELEASED:+--batch-size 8}
row table1/qwen2.5-7b-rlhf from qwen2.5-7b-sft-plain grpo --preset paper$AS_RELEASED --think-format plain $OTHER_BATCH
row table1/qwen2.5-7b-rlmt from qwen2.5-7b-sft-think grpo --preset paper$AS_RELEASED

# --- Llama-3.1-8B-Instruct
MAX_TOKENS=4096 MODEL=meta-llama/Llama-3.1-8B-Instruct row table1/llama3.1-8b-instruct-released
row table1/llama3.1-8b-instruct-sft-plain sft --model meta-llama/Llama-3.1-8B-Instruct --think-format plain
row table1/llama3.1-8b-instruct-sft-think sft --model meta-llama/Llama-3.1-8B-Instruct
row table1/llama3.1-8b-instruct-rlhf from llama3.1-8b-instruct-sft-plain grpo --preset paper-instruct$AS_RELEASED --think-format plain
row table1/llama3.1-8b-instruct-rlmt from llama3.1-8b-instruct-sft-think grpo --preset paper-instruct$AS_RELEASED $OTHER_BATCH

# --- Qwen2.5-7B-Instruct
MAX_TOKENS=4096 MODEL=Qwen/Qwen2.5-7B-Instruct row table1/qwen2.5-7b-instruct-released
row table1/qwen2.5-7b-instruct-sft-plain sft --model Qwen/Qwen2.5-7B-Instruct --think-format plain ${AS_RELEASED:+--batch-size 8}
row table1/qwen2.5-7b-instruct-sft-think sft --model Qwen/Qwen2.5-7B-Instruct ${AS_RELEASED:+--batch-size 8}
row table1/qwen2.5-7b-instruct-rlhf from qwen2.5-7b-instruct-sft-plain grpo --preset paper-instruct$AS_RELEASED --think-format plain
row table1/qwen2.5-7b-instruct-rlmt from qwen2.5-7b-instruct-sft-think grpo --preset paper-instruct$AS_RELEASED $OTHER_BATCH

# --- Llama-3.1-8B, Zero: an instruction instead of SFT
THINK_FORMAT=zero_plain MODEL=meta-llama/Llama-3.1-8B row table1/llama3.1-8b-prompted-plain
THINK_FORMAT=zero_think MODEL=meta-llama/Llama-3.1-8B row table1/llama3.1-8b-prompted-think
row table1/llama3.1-8b-rlhf-zero grpo --preset paper-zero$AS_RELEASED --model meta-llama/Llama-3.1-8B --think-format zero_plain
row table1/llama3.1-8b-rlmt-zero grpo --preset paper-zero$AS_RELEASED --model meta-llama/Llama-3.1-8B

# --- Qwen2.5-7B, Zero: an instruction instead of SFT
THINK_FORMAT=zero_plain MODEL=Qwen/Qwen2.5-7B row table1/qwen2.5-7b-prompted-plain
THINK_FORMAT=zero_think MODEL=Qwen/Qwen2.5-7B row table1/qwen2.5-7b-prompted-think
row table1/qwen2.5-7b-rlhf-zero grpo --preset paper-zero$AS_RELEASED --model Qwen/Qwen2.5-7B --think-format zero_plain
row table1/qwen2.5-7b-rlmt-zero grpo --preset paper-zero$AS_RELEASED --model Qwen/Qwen2.5-7B ${AS_RELEASED:+--steps 150 --save-steps 50}
