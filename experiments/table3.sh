# Table 3: DPO and PPO instead of GRPO.
#
# GPU-hours are those that the paper's README reports for an 8B model on H100, scaled by steps; none was measured here.
# data/README.md says how the files in data/ are made.
# What a block needs (`# needs:`) and this file does not have is in table1.sh: run that first.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table3.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${LAUNCH:=accelerate launch --config_file accelerate/8gpu_fsdp2.yaml}"
: "${AS_RELEASED:=}" # --as-released: the values of the paper's released code, where they differ from the paper's
: "${GOLD_FLAGS:=}"  # --gold judge:MODEL --gold-prompts FILE: held-out prompts, measured at every checkpoint
: "${TEMPLATES:=}" # folder with the judges' instructions; evaluate.sh says how it is laid out
export SEED RESULTS JUDGE_FLAGS TEMPLATES

# --- Llama-3.1-8B, warm-started

# row: table3/llama3.1-8b-sft-plain
# needs: table1/llama3.1-8b-sft-plain

# row: table3/llama3.1-8b-sft-think
# needs: table1/llama3.1-8b-sft-think

# stage: llama3.1-8b-rlhf-dpo
# needs: llama3.1-8b-sft-plain
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/llama3.1-8b-rlhf-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-dpo-s$SEED" --resume

# row: table3/llama3.1-8b-rlhf-dpo
# needs: llama3.1-8b-rlhf-dpo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-dpo-s$SEED/model" \
  "llama3.1-8b-rlhf-dpo-s$SEED"

# stage: llama3.1-8b-rlmt-dpo
# needs: llama3.1-8b-sft-think
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/llama3.1-8b-rlmt-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-dpo-s$SEED" --resume

# row: table3/llama3.1-8b-rlmt-dpo
# needs: llama3.1-8b-rlmt-dpo
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-dpo-s$SEED/model" "llama3.1-8b-rlmt-dpo-s$SEED"

# stage: llama3.1-8b-rlhf-ppo
# needs: llama3.1-8b-sft-plain
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/llama3.1-8b-rlhf-ppo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-ppo-s$SEED" --resume

# row: table3/llama3.1-8b-rlhf-ppo
# needs: llama3.1-8b-rlhf-ppo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-ppo-s$SEED/model" \
  "llama3.1-8b-rlhf-ppo-s$SEED"

# stage: llama3.1-8b-rlmt-ppo
# needs: llama3.1-8b-sft-think
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/llama3.1-8b-rlmt-ppo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-ppo-s$SEED" --resume

# row: table3/llama3.1-8b-rlmt-ppo
# needs: llama3.1-8b-rlmt-ppo
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-ppo-s$SEED/model" "llama3.1-8b-rlmt-ppo-s$SEED"

# --- Qwen2.5-7B, warm-started

# row: table3/qwen2.5-7b-sft-plain
# needs: table1/qwen2.5-7b-sft-plain

# row: table3/qwen2.5-7b-sft-think
# needs: table1/qwen2.5-7b-sft-think

# stage: qwen2.5-7b-rlhf-dpo
# needs: qwen2.5-7b-sft-plain
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/qwen2.5-7b-rlhf-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlhf-dpo-s$SEED" --resume

# row: table3/qwen2.5-7b-rlhf-dpo
# needs: qwen2.5-7b-rlhf-dpo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-dpo-s$SEED/model" "qwen2.5-7b-rlhf-dpo-s$SEED"

# stage: qwen2.5-7b-rlmt-dpo
# needs: qwen2.5-7b-sft-think
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/qwen2.5-7b-rlmt-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlmt-dpo-s$SEED" --resume

# row: table3/qwen2.5-7b-rlmt-dpo
# needs: qwen2.5-7b-rlmt-dpo
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-dpo-s$SEED/model" "qwen2.5-7b-rlmt-dpo-s$SEED"

# stage: qwen2.5-7b-rlhf-ppo
# needs: qwen2.5-7b-sft-plain
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/qwen2.5-7b-rlhf-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlhf-ppo-s$SEED" --resume

# row: table3/qwen2.5-7b-rlhf-ppo
# needs: qwen2.5-7b-rlhf-ppo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-ppo-s$SEED/model" "qwen2.5-7b-rlhf-ppo-s$SEED"

# stage: qwen2.5-7b-rlmt-ppo
# needs: qwen2.5-7b-sft-think
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/qwen2.5-7b-rlmt-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlmt-ppo-s$SEED" --resume

# row: table3/qwen2.5-7b-rlmt-ppo
# needs: qwen2.5-7b-rlmt-ppo
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-ppo-s$SEED/model" "qwen2.5-7b-rlmt-ppo-s$SEED"

# --- Llama-3.1-8B-Instruct

# row: table3/llama3.1-8b-instruct-released
# needs: table1/llama3.1-8b-instruct-released

# row: table3/llama3.1-8b-instruct-sft-plain
# needs: table1/llama3.1-8b-instruct-sft-plain

# row: table3/llama3.1-8b-instruct-sft-think
# needs: table1/llama3.1-8b-instruct-sft-think

# stage: llama3.1-8b-instruct-rlhf-dpo
# needs: llama3.1-8b-instruct-sft-plain
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/llama3.1-8b-instruct-rlhf-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-instruct-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-instruct-rlhf-dpo-s$SEED" --resume

# row: table3/llama3.1-8b-instruct-rlhf-dpo
# needs: llama3.1-8b-instruct-rlhf-dpo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlhf-dpo-s$SEED/model" \
  "llama3.1-8b-instruct-rlhf-dpo-s$SEED"

# stage: llama3.1-8b-instruct-rlmt-dpo
# needs: llama3.1-8b-instruct-sft-think
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/llama3.1-8b-instruct-rlmt-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-instruct-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-instruct-rlmt-dpo-s$SEED" --resume

# row: table3/llama3.1-8b-instruct-rlmt-dpo
# needs: llama3.1-8b-instruct-rlmt-dpo
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-dpo-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-dpo-s$SEED"

# stage: llama3.1-8b-instruct-rlhf-ppo
# needs: llama3.1-8b-instruct-sft-plain
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/llama3.1-8b-instruct-rlhf-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-instruct-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-instruct-rlhf-ppo-s$SEED" --resume

# row: table3/llama3.1-8b-instruct-rlhf-ppo
# needs: llama3.1-8b-instruct-rlhf-ppo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlhf-ppo-s$SEED/model" \
  "llama3.1-8b-instruct-rlhf-ppo-s$SEED"

# stage: llama3.1-8b-instruct-rlmt-ppo
# needs: llama3.1-8b-instruct-sft-think
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/llama3.1-8b-instruct-rlmt-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-instruct-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-instruct-rlmt-ppo-s$SEED" --resume

# row: table3/llama3.1-8b-instruct-rlmt-ppo
# needs: llama3.1-8b-instruct-rlmt-ppo
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-ppo-s$SEED/model" \
  "llama3.1-8b-instruct-rlmt-ppo-s$SEED"

# --- Qwen2.5-7B-Instruct

# row: table3/qwen2.5-7b-instruct-released
# needs: table1/qwen2.5-7b-instruct-released

# row: table3/qwen2.5-7b-instruct-sft-plain
# needs: table1/qwen2.5-7b-instruct-sft-plain

# row: table3/qwen2.5-7b-instruct-sft-think
# needs: table1/qwen2.5-7b-instruct-sft-think

# stage: qwen2.5-7b-instruct-rlhf-dpo
# needs: qwen2.5-7b-instruct-sft-plain
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/qwen2.5-7b-instruct-rlhf-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-instruct-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-instruct-rlhf-dpo-s$SEED" --resume

# row: table3/qwen2.5-7b-instruct-rlhf-dpo
# needs: qwen2.5-7b-instruct-rlhf-dpo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlhf-dpo-s$SEED/model" \
  "qwen2.5-7b-instruct-rlhf-dpo-s$SEED"

# stage: qwen2.5-7b-instruct-rlmt-dpo
# needs: qwen2.5-7b-instruct-sft-think
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/qwen2.5-7b-instruct-rlmt-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-instruct-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-instruct-rlmt-dpo-s$SEED" --resume

# row: table3/qwen2.5-7b-instruct-rlmt-dpo
# needs: qwen2.5-7b-instruct-rlmt-dpo
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlmt-dpo-s$SEED/model" \
  "qwen2.5-7b-instruct-rlmt-dpo-s$SEED"

# stage: qwen2.5-7b-instruct-rlhf-ppo
# needs: qwen2.5-7b-instruct-sft-plain
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/qwen2.5-7b-instruct-rlhf-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-instruct-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-instruct-rlhf-ppo-s$SEED" --resume

# row: table3/qwen2.5-7b-instruct-rlhf-ppo
# needs: qwen2.5-7b-instruct-rlhf-ppo
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlhf-ppo-s$SEED/model" \
  "qwen2.5-7b-instruct-rlhf-ppo-s$SEED"

# stage: qwen2.5-7b-instruct-rlmt-ppo
# needs: qwen2.5-7b-instruct-sft-think
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/qwen2.5-7b-instruct-rlmt-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-instruct-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-instruct-rlmt-ppo-s$SEED" --resume

# row: table3/qwen2.5-7b-instruct-rlmt-ppo
# needs: qwen2.5-7b-instruct-rlmt-ppo
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlmt-ppo-s$SEED/model" \
  "qwen2.5-7b-instruct-rlmt-ppo-s$SEED"

# --- Llama-3.1-8B, Zero: an instruction instead of SFT

# row: table3/llama3.1-8b-prompted-plain
# needs: table1/llama3.1-8b-prompted-plain

# row: table3/llama3.1-8b-prompted-think
# needs: table1/llama3.1-8b-prompted-think

# row: table3/llama3.1-8b-rlhf-zero-dpo
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/llama3.1-8b-rlhf-zero-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-zero-dpo-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-zero-dpo-s$SEED/model" \
  "llama3.1-8b-rlhf-zero-dpo-s$SEED"

# row: table3/llama3.1-8b-rlmt-zero-dpo
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/llama3.1-8b-rlmt-zero-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-zero-dpo-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-zero-dpo-s$SEED/model" "llama3.1-8b-rlmt-zero-dpo-s$SEED"

# row: table3/llama3.1-8b-rlhf-zero-ppo
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/llama3.1-8b-rlhf-zero-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-zero-ppo-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-zero-ppo-s$SEED/model" \
  "llama3.1-8b-rlhf-zero-ppo-s$SEED"

# row: table3/llama3.1-8b-rlmt-zero-ppo
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/llama3.1-8b-rlmt-zero-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-zero-ppo-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-zero-ppo-s$SEED/model" "llama3.1-8b-rlmt-zero-ppo-s$SEED"

# --- Qwen2.5-7B, Zero: an instruction instead of SFT

# row: table3/qwen2.5-7b-prompted-plain
# needs: table1/qwen2.5-7b-prompted-plain

# row: table3/qwen2.5-7b-prompted-think
# needs: table1/qwen2.5-7b-prompted-think

# row: table3/qwen2.5-7b-rlhf-zero-dpo
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/qwen2.5-7b-rlhf-zero-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlhf-zero-dpo-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-zero-dpo-s$SEED/model" \
  "qwen2.5-7b-rlhf-zero-dpo-s$SEED"

# row: table3/qwen2.5-7b-rlmt-zero-dpo
# about 8 H100-hours, without the sampling
$LAUNCH train_dpo.py --preset table3/qwen2.5-7b-rlmt-zero-dpo $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlmt-zero-dpo-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-zero-dpo-s$SEED/model" "qwen2.5-7b-rlmt-zero-dpo-s$SEED"

# row: table3/qwen2.5-7b-rlhf-zero-ppo
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/qwen2.5-7b-rlhf-zero-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlhf-zero-ppo-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-zero-ppo-s$SEED/model" \
  "qwen2.5-7b-rlhf-zero-ppo-s$SEED"

# row: table3/qwen2.5-7b-rlmt-zero-ppo
# about 62 H100-hours
$LAUNCH train_ppo.py --preset table3/qwen2.5-7b-rlmt-zero-ppo --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlmt-zero-ppo-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-zero-ppo-s$SEED/model" "qwen2.5-7b-rlmt-zero-ppo-s$SEED"
