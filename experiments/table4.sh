# Table 4: other prompts, another teacher of the warm start, other reward models.
#
# GPU-hours are those that the paper's README reports for an 8B model on H100, scaled by steps; none was measured here.
# data/README.md says how the files in data/ are made.
# What a block needs (`# needs:`) and this file does not have is in table1.sh: run that first.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/table4.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${LAUNCH:=accelerate launch --config_file accelerate/8gpu_fsdp2.yaml}"
: "${AS_RELEASED:=}" # --as-released: the values of the paper's released code, where they differ from the paper's
: "${GOLD_FLAGS:=}"  # --gold judge:MODEL --gold-prompts FILE: held-out prompts, measured at every checkpoint
: "${TEMPLATES:=}" # folder with the judges' instructions; evaluate.sh says how it is laid out
export SEED RESULTS JUDGE_FLAGS TEMPLATES

# row: table4/llama3.1-8b-rlmt
# needs: table1/llama3.1-8b-rlmt

# row: table4/llama3.1-8b-rlmt-ultrafeedback
# needs: llama3.1-8b-sft-think
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table4/llama3.1-8b-rlmt-ultrafeedback $AS_RELEASED --prompts data/ultrafeedback.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-ultrafeedback-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-ultrafeedback-s$SEED/model" \
  "llama3.1-8b-rlmt-ultrafeedback-s$SEED"

# row: table4/llama3.1-8b-rlmt-tulu3
# needs: llama3.1-8b-sft-think
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table4/llama3.1-8b-rlmt-tulu3 $AS_RELEASED --prompts data/tulu3_random.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-tulu3-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-tulu3-s$SEED/model" "llama3.1-8b-rlmt-tulu3-s$SEED"

# stage: llama3.1-8b-sft-plain-gpt4.1mini
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table4/llama3.1-8b-sft-plain-gpt4.1mini --traces data/traces_gpt4.1mini.jsonl \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-sft-plain-gpt4.1mini-s$SEED" --resume

# row: table4/llama3.1-8b-sft-plain-gpt4.1mini
# needs: llama3.1-8b-sft-plain-gpt4.1mini
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-sft-plain-gpt4.1mini-s$SEED/model" \
  "llama3.1-8b-sft-plain-gpt4.1mini-s$SEED"

# stage: llama3.1-8b-sft-think-gpt4.1mini
# about 20 H100-hours
$LAUNCH train_sft_warmstart.py --preset table4/llama3.1-8b-sft-think-gpt4.1mini --traces data/traces_gpt4.1mini.jsonl \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-sft-think-gpt4.1mini-s$SEED" --resume

# row: table4/llama3.1-8b-sft-think-gpt4.1mini
# needs: llama3.1-8b-sft-think-gpt4.1mini
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-sft-think-gpt4.1mini-s$SEED/model" \
  "llama3.1-8b-sft-think-gpt4.1mini-s$SEED"

# row: table4/llama3.1-8b-rlhf-gpt4.1mini
# needs: llama3.1-8b-sft-plain-gpt4.1mini
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table4/llama3.1-8b-rlhf-gpt4.1mini $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-plain-gpt4.1mini-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-gpt4.1mini-s$SEED" --resume
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-gpt4.1mini-s$SEED/model" \
  "llama3.1-8b-rlhf-gpt4.1mini-s$SEED"

# row: table4/llama3.1-8b-rlmt-gpt4.1mini
# needs: llama3.1-8b-sft-think-gpt4.1mini
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table4/llama3.1-8b-rlmt-gpt4.1mini $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-think-gpt4.1mini-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-gpt4.1mini-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-gpt4.1mini-s$SEED/model" "llama3.1-8b-rlmt-gpt4.1mini-s$SEED"

# row: table4/llama3.1-8b-rlhf-skywork-v2
# needs: llama3.1-8b-sft-plain
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table4/llama3.1-8b-rlhf-skywork-v2 $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-skywork-v2-s$SEED" --resume
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-skywork-v2-s$SEED/model" \
  "llama3.1-8b-rlhf-skywork-v2-s$SEED"

# row: table4/llama3.1-8b-rlmt-skywork-v2
# needs: llama3.1-8b-sft-think
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table4/llama3.1-8b-rlmt-skywork-v2 $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-skywork-v2-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-skywork-v2-s$SEED/model" "llama3.1-8b-rlmt-skywork-v2-s$SEED"

# --- ArmoRM: examples/armorm.py computes its score from the published weights. `python -m examples.armorm` first
# compares that with the model card; it has been tried on tiny weights alone.

# row: table4/llama3.1-8b-rlhf-armorm
# needs: llama3.1-8b-sft-plain
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table4/llama3.1-8b-rlhf-armorm $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlhf-armorm-s$SEED" --resume
MAX_TOKENS=4096 bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlhf-armorm-s$SEED/model" \
  "llama3.1-8b-rlhf-armorm-s$SEED"

# row: table4/llama3.1-8b-rlmt-armorm
# needs: llama3.1-8b-sft-think
# about 62 H100-hours
$LAUNCH train_grpo.py --preset table4/llama3.1-8b-rlmt-armorm $AS_RELEASED --prompts data/wildchat_if.jsonl $GOLD_FLAGS \
  --model "$RESULTS/llama3.1-8b-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/llama3.1-8b-rlmt-armorm-s$SEED" --resume
bash experiments/evaluate.sh "$RESULTS/llama3.1-8b-rlmt-armorm-s$SEED/model" "llama3.1-8b-rlmt-armorm-s$SEED"
