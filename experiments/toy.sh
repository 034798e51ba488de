# The matrix of the paper on the toy world, in about 40 minutes on two CPU cores: with thinking (rlmt) and without (rlhf),
# warm-started or Zero, three algorithms, three mixtures of prompts, two teachers, three reward models.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
: "${SEED:=0}" "${RESULTS:=results/toy}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 # one core a command; nothing is downloaded
RL="--preset toy --reward-on response --gold-prompts data/toy/held_out_prompts.jsonl"
# gold by the tasks' checklists, the proxy beside it
EVALUATE="python eval_wildbench.py --tasks data/toy/benchmark_tasks.jsonl --judge data/toy/world.py:judge --limit 256 \
  --temperatures 1.0 0.0 --reward-model data/toy/reward_model --reward-on response"

# stage: toy-data
python -m data.toy.world

# --- The base model, only asked to think or to answer

# row: toy/toy-prompted-think
# needs: toy-data
$EVALUATE --model data/toy/base --max-tokens 160 --think-format zero_think \
  --seed "$SEED" --out "$RESULTS/toy-prompted-think-s$SEED--gold" --resume

# row: toy/toy-prompted-plain
# needs: toy-data
$EVALUATE --model data/toy/base --max-tokens 160 --think-format zero_plain \
  --seed "$SEED" --out "$RESULTS/toy-prompted-plain-s$SEED--gold" --resume

# --- Warm start

# row: toy/toy-sft-think
# needs: toy-data
python train_sft_warmstart.py --preset toy --seed "$SEED" --out "$RESULTS/toy-sft-think-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-sft-think-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-s$SEED--gold" --resume

# row: toy/toy-sft-plain
# needs: toy-data
python train_sft_warmstart.py --preset toy --think-format plain --seed "$SEED" --out "$RESULTS/toy-sft-plain-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-sft-plain-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-s$SEED--gold" --resume

# --- GRPO

# row: toy/toy-rlmt
# needs: toy/toy-sft-think
python train_grpo.py $RL --steps 14 --save-steps 7 --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-s$SEED--gold" --resume

# row: toy/toy-rlhf
# needs: toy/toy-sft-plain
python train_grpo.py $RL --steps 14 --save-steps 7 --think-format plain --model "$RESULTS/toy-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlhf-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-s$SEED--gold" --resume

# --- DPO

# row: toy/toy-rlmt-dpo
# needs: toy/toy-sft-think
python train_dpo.py $RL --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-dpo-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-dpo-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-dpo-s$SEED--gold" --resume

# row: toy/toy-rlhf-dpo
# needs: toy/toy-sft-plain
python train_dpo.py $RL --think-format plain --model "$RESULTS/toy-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-dpo-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlhf-dpo-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-dpo-s$SEED--gold" --resume

# --- PPO

# row: toy/toy-rlmt-ppo
# needs: toy/toy-sft-think
python train_ppo.py $RL --steps 14 --save-steps 7 --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-ppo-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-ppo-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-ppo-s$SEED--gold" --resume

# row: toy/toy-rlhf-ppo
# needs: toy/toy-sft-plain
python train_ppo.py $RL --steps 14 --save-steps 7 --think-format plain --model "$RESULTS/toy-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-ppo-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlhf-ppo-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-ppo-s$SEED--gold" --resume

# --- Zero: GRPO from the base model
# This base model thinks aloud whatever it is asked. So without thinking no completion has the format, and all are cut
# off: --allow-truncation lets the run go on.

# row: toy/toy-rlmt-zero
# needs: toy-data
python train_grpo.py $RL --steps 14 --save-steps 7 --model data/toy/base \
  --think-format zero_think --allow-truncation --max-prompt-tokens 256 --max-completion-tokens 160 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-zero-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-zero-s$SEED/model" --max-tokens 160 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-zero-s$SEED--gold" --resume

# row: toy/toy-rlhf-zero
# needs: toy-data
python train_grpo.py $RL --steps 14 --save-steps 7 --model data/toy/base \
  --think-format zero_plain --allow-truncation --max-prompt-tokens 256 --max-completion-tokens 160 \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-zero-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlhf-zero-s$SEED/model" --max-tokens 160 \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-zero-s$SEED--gold" --resume

# --- Other mixtures of prompts

# stage: toy-data-small-budgets
python -m data.toy.world --out "$RESULTS/data-small-budgets" --budgets 11 14

# row: toy/toy-rlmt-small-budgets
# needs: toy-data-small-budgets toy/toy-sft-think
python train_grpo.py $RL --steps 14 --save-steps 7 --prompts "$RESULTS/data-small-budgets/rl_prompts.jsonl" \
  --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-small-budgets-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-small-budgets-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-small-budgets-s$SEED--gold" --resume

# stage: toy-data-large-budgets
python -m data.toy.world --out "$RESULTS/data-large-budgets" --budgets 17 20

# row: toy/toy-rlmt-large-budgets
# needs: toy-data-large-budgets toy/toy-sft-think
python train_grpo.py $RL --steps 14 --save-steps 7 --prompts "$RESULTS/data-large-budgets/rl_prompts.jsonl" \
  --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-large-budgets-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-large-budgets-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-large-budgets-s$SEED--gold" --resume

# --- A teacher that slips half as often

# stage: toy-data-careful
python -m data.toy.world --out "$RESULTS/data-careful" --slips 0.5

# row: toy/toy-sft-think-careful
# needs: toy-data toy-data-careful
python train_sft_warmstart.py --preset toy --traces "$RESULTS/data-careful/sft_traces.jsonl" \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-careful-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-sft-think-careful-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-careful-s$SEED--gold" --resume

# row: toy/toy-sft-plain-careful
# needs: toy-data toy-data-careful
python train_sft_warmstart.py --preset toy --traces "$RESULTS/data-careful/sft_traces.jsonl" --think-format plain \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-careful-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-sft-plain-careful-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-careful-s$SEED--gold" --resume

# row: toy/toy-rlmt-careful
# needs: toy-data-careful toy/toy-sft-think-careful
python train_grpo.py $RL --steps 14 --save-steps 7 --model "$RESULTS/toy-sft-think-careful-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-careful-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-careful-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-careful-s$SEED--gold" --resume

# row: toy/toy-rlhf-careful
# needs: toy-data-careful toy/toy-sft-plain-careful
python train_grpo.py $RL --steps 14 --save-steps 7 --think-format plain --model "$RESULTS/toy-sft-plain-careful-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-careful-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlhf-careful-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-careful-s$SEED--gold" --resume

# --- Weaker reward models

# stage: toy-reward-medium-rm
# needs: toy-data
[ -e "$RESULTS/reward-medium-rm/model.safetensors" ] ||
  python -m data.toy.models reward --base data/toy/base --batch 12 --steps 150 --out "$RESULTS/reward-medium-rm"

# row: toy/toy-rlmt-medium-rm
# needs: toy-reward-medium-rm toy/toy-sft-think
python train_grpo.py $RL --steps 14 --save-steps 7 --reward-model "$RESULTS/reward-medium-rm" \
  --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-medium-rm-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-medium-rm-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-medium-rm-s$SEED--gold" --resume

# row: toy/toy-rlhf-medium-rm
# needs: toy-reward-medium-rm toy/toy-sft-plain
python train_grpo.py $RL --steps 14 --save-steps 7 --reward-model "$RESULTS/reward-medium-rm" --think-format plain \
  --model "$RESULTS/toy-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-medium-rm-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlhf-medium-rm-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-medium-rm-s$SEED--gold" --resume

# stage: toy-reward-weak-rm
# needs: toy-data
python train_reward.py --preset toy --out "$RESULTS/reward-weak-rm" --resume

# row: toy/toy-rlmt-weak-rm
# needs: toy-reward-weak-rm toy/toy-sft-think
python train_grpo.py $RL --steps 14 --save-steps 7 --reward-model "$RESULTS/reward-weak-rm/model" \
  --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-weak-rm-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlmt-weak-rm-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlmt-weak-rm-s$SEED--gold" --resume

# row: toy/toy-rlhf-weak-rm
# needs: toy-reward-weak-rm toy/toy-sft-plain
python train_grpo.py $RL --steps 14 --save-steps 7 --reward-model "$RESULTS/reward-weak-rm/model" --think-format plain \
  --model "$RESULTS/toy-sft-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-weak-rm-s$SEED" --resume
$EVALUATE --model "$RESULTS/toy-rlhf-weak-rm-s$SEED/model" --max-tokens 128 \
  --seed "$SEED" --out "$RESULTS/toy-rlhf-weak-rm-s$SEED--gold" --resume
