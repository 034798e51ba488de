# Table 1: SFT, then GRPO, with thinking (rlmt) and without (rlhf), on seven benchmarks.
#
# GPU-hours are those that the paper's README reports for an 8B model on H100, scaled by steps; none was measured here.
# data/README.md says how the files in data/ are made.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table1.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${LAUNCH:=accelerate launch --config_file accelerate/8gpu_fsdp2.yaml}"
: "${AS_RELEASED:=}" # --as-released: the values of the paper's released code, where they differ from the paper's
: "${GOLD_FLAGS:=}"  # --gold judge:MODEL --gold-prompts FILE: held-out prompts, measured at every checkpoint
: "${TEMPLATES:=}" # folder with the judges' instructions; evaluate.sh says how it is laid out
export SEED RESULTS JUDGE_FLAGS TEMPLATES

# --- Llama-3.1-8B, warm-started

# stage: llama3.1-8b-sft-plain
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table1/llama3.1-8b-sft-plain --traces data/traces.jsonl \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-sft-plain-s$SEED" --resume

# row: table1/llama3.1-8b-sft-plain
# needs: llama3.1-8b-sft-plain
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-sft-plain-s$SEED/model" \
  "llama3.1-8b-sft-plain-s$SEED"

# stage: llama3.1-8b-sft-think
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table1/llama3.1-8b-sft-think --traces data/traces.jsonl \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-sft-think-s$SEED" --resume

# row: table1/llama3.1-8b-sft-think
# needs: llama3.1-8b-sft-think
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" "llama3.1-8b-sft-think-s$SEED"

# stage: llama3.1-8b-rlhf
# needs: llama3.1-8b-sft-plain
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/llama3.1-8b-rlhf $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-s$SEED" --resume

# row: table1/llama3.1-8b-rlhf
# needs: llama3.1-8b-rlhf
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-s$SEED/model" "llama3.1-8b-rlhf-s$SEED"

# stage: llama3.1-8b-rlmt
# needs: llama3.1-8b-sft-think
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/llama3.1-8b-rlmt $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-s$SEED" --resume

# row: table1/llama3.1-8b-rlmt
# needs: llama3.1-8b-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-s$SEED/model" "llama3.1-8b-rlmt-s$SEED"

# --- Qwen2.5-7B, warm-started

# stage: qwen2.5-7b-sft-plain
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table1/qwen2.5-7b-sft-plain $AS_RELEASED --traces data/traces.jsonl \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-sft-plain-s$SEED" --resume

# row: table1/qwen2.5-7b-sft-plain
# needs: qwen2.5-7b-sft-plain
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-sft-plain-s$SEED/model" \
  "qwen2.5-7b-sft-plain-s$SEED"

# stage: qwen2.5-7b-sft-think
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table1/qwen2.5-7b-sft-think $AS_RELEASED --traces data/traces.jsonl \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-sft-think-s$SEED" --resume

# row: table1/qwen2.5-7b-sft-think
# needs: qwen2.5-7b-sft-think
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-sft-think-s$SEED/model" "qwen2.5-7b-sft-think-s$SEED"

# stage: qwen2.5-7b-rlhf
# needs: qwen2.5-7b-sft-plain
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/qwen2.5-7b-rlhf $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlhf-s$SEED" --resume

# row: table1/qwen2.5-7b-rlhf
# needs: qwen2.5-7b-rlhf
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-s$SEED/model" "qwen2.5-7b-rlhf-s$SEED"

# stage: qwen2.5-7b-rlmt
# needs: qwen2.5-7b-sft-think
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/qwen2.5-7b-rlmt $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlmt-s$SEED" --resume

# row: table1/qwen2.5-7b-rlmt
# needs: qwen2.5-7b-rlmt
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-s$SEED/model" "qwen2.5-7b-rlmt-s$SEED"

# --- Llama-3.1-8B-Instruct

# row: table1/llama3.1-8b-instruct-released
MAX_TOKENS=4096 bash experiments/evaluate.sh meta-llama/Llama-3.1-8B-Instruct "llama3.1-8b-instruct-released-s$SEED"

# stage: llama3.1-8b-instruct-sft-plain
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table1/llama3.1-8b-instruct-sft-plain --traces data/traces.jsonl \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-instruct-sft-plain-s$SEED" --resume

# row: table1/llama3.1-8b-instruct-sft-plain
# needs: llama3.1-8b-instruct-sft-plain
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-sft-plain-s$SEED/model" \
  "llama3.1-8b-instruct-sft-plain-s$SEED"

# stage: llama3.1-8b-instruct-sft-think
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table1/llama3.1-8b-instruct-sft-think --traces data/traces.jsonl \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-instruct-sft-think-s$SEED" --resume

# row: table1/llama3.1-8b-instruct-sft-think
# needs: llama3.1-8b-instruct-sft-think
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-sft-think-s$SEED/model" \
  "llama3.1-8b-instruct-sft-think-s$SEED"

# stage: llama3.1-8b-instruct-rlhf
# needs: llama3.1-8b-instruct-sft-plain
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/llama3.1-8b-instruct-rlhf $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-instruct-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-instruct-rlhf-s$SEED" --resume

# row: table1/llama3.1-8b-instruct-rlhf
# needs: llama3.1-8b-instruct-rlhf
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlhf-s$SEED/model" \
  "llama3.1-8b-instruct-rlhf-s$SEED"

# stage: llama3.1-8b-instruct-rlmt
# needs: llama3.1-8b-instruct-sft-think
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/llama3.1-8b-instruct-rlmt $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-instruct-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-instruct-rlmt-s$SEED" --resume

# row: table1/llama3.1-8b-instruct-rlmt
# needs: llama3.1-8b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-instruct-rlmt-s$SEED/model" "llama3.1-8b-instruct-rlmt-s$SEED"

# --- Qwen2.5-7B-Instruct

# row: table1/qwen2.5-7b-instruct-released
MAX_TOKENS=4096 bash experiments/evaluate.sh Qwen/Qwen2.5-7B-Instruct "qwen2.5-7b-instruct-released-s$SEED"

# stage: qwen2.5-7b-instruct-sft-plain
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table1/qwen2.5-7b-instruct-sft-plain $AS_RELEASED --traces data/traces.jsonl \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-instruct-sft-plain-s$SEED" --resume

# row: table1/qwen2.5-7b-instruct-sft-plain
# needs: qwen2.5-7b-instruct-sft-plain
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-sft-plain-s$SEED/model" \
  "qwen2.5-7b-instruct-sft-plain-s$SEED"

# stage: qwen2.5-7b-instruct-sft-think
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table1/qwen2.5-7b-instruct-sft-think $AS_RELEASED --traces data/traces.jsonl \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-instruct-sft-think-s$SEED" --resume

# row: table1/qwen2.5-7b-instruct-sft-think
# needs: qwen2.5-7b-instruct-sft-think
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-sft-think-s$SEED/model" \
  "qwen2.5-7b-instruct-sft-think-s$SEED"

# stage: qwen2.5-7b-instruct-rlhf
# needs: qwen2.5-7b-instruct-sft-plain
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/qwen2.5-7b-instruct-rlhf $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-instruct-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-instruct-rlhf-s$SEED" --resume

# row: table1/qwen2.5-7b-instruct-rlhf
# needs: qwen2.5-7b-instruct-rlhf
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlhf-s$SEED/model" \
  "qwen2.5-7b-instruct-rlhf-s$SEED"

# stage: qwen2.5-7b-instruct-rlmt
# needs: qwen2.5-7b-instruct-sft-think
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/qwen2.5-7b-instruct-rlmt $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/qwen2.5-7b-instruct-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-instruct-rlmt-s$SEED" --resume

# row: table1/qwen2.5-7b-instruct-rlmt
# needs: qwen2.5-7b-instruct-rlmt
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-instruct-rlmt-s$SEED/model" "qwen2.5-7b-instruct-rlmt-s$SEED"

# --- Llama-3.1-8B, Zero: an instruction instead of SFT

# row: table1/llama3.1-8b-prompted-plain
THINK_FORMAT=zero_plain bash experiments/evaluate.sh meta-llama/Llama-3.1-8B \
  "llama3.1-8b-prompted-plain-s$SEED"

# row: table1/llama3.1-8b-prompted-think
THINK_FORMAT=zero_think bash experiments/evaluate.sh meta-llama/Llama-3.1-8B "llama3.1-8b-prompted-think-s$SEED"

# stage: llama3.1-8b-rlhf-zero
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/llama3.1-8b-rlhf-zero $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-zero-s$SEED" --resume

# row: table1/llama3.1-8b-rlhf-zero
# needs: llama3.1-8b-rlhf-zero
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-zero-s$SEED/model" \
  "llama3.1-8b-rlhf-zero-s$SEED"

# stage: llama3.1-8b-rlmt-zero
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/llama3.1-8b-rlmt-zero $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-zero-s$SEED" --resume

# row: table1/llama3.1-8b-rlmt-zero
# needs: llama3.1-8b-rlmt-zero
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-zero-s$SEED/model" "llama3.1-8b-rlmt-zero-s$SEED"

# --- Qwen2.5-7B, Zero: an instruction instead of SFT

# row: table1/qwen2.5-7b-prompted-plain
THINK_FORMAT=zero_plain bash experiments/evaluate.sh Qwen/Qwen2.5-7B \
  "qwen2.5-7b-prompted-plain-s$SEED"

# row: table1/qwen2.5-7b-prompted-think
THINK_FORMAT=zero_think bash experiments/evaluate.sh Qwen/Qwen2.5-7B "qwen2.5-7b-prompted-think-s$SEED"

# stage: qwen2.5-7b-rlhf-zero
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/qwen2.5-7b-rlhf-zero $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlhf-zero-s$SEED" --resume

# row: table1/qwen2.5-7b-rlhf-zero
# needs: qwen2.5-7b-rlhf-zero
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlhf-zero-s$SEED/model" \
  "qwen2.5-7b-rlhf-zero-s$SEED"

# stage: qwen2.5-7b-rlmt-zero
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table1/qwen2.5-7b-rlmt-zero $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --seed "$SEED" --out "$RESULTS/qwen2.5-7b-rlmt-zero-s$SEED" --resume

# row: table1/qwen2.5-7b-rlmt-zero
# needs: qwen2.5-7b-rlmt-zero
bash experiments/evaluate.sh "$RESULTS/qwen2.5-7b-rlmt-zero-s$SEED/model" "qwen2.5-7b-rlmt-zero-s$SEED"
