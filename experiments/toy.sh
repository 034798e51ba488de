# The matrix of the paper on the toy world, in about 40 minutes on two CPU cores: with thinking (rlmt) and without (rlhf),
# warm-started or Zero, three algorithms, three mixtures of prompts, two teachers, three reward models.
set -euo pipefail
: "${RESULTS:=results/toy}" "${LAUNCH:=python}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 # one core per command; nothing is downloaded
RL="--preset toy --reward-on response --gold-prompts data/toy/held_out_prompts.jsonl"
STEPS="--steps 14 --save-steps 7" # of GRPO and PPO
# gold by the tasks' checklists, the proxy beside it
EVALUATE="python eval_wildbench.py --tasks data/toy/benchmark_tasks.jsonl --judge data/toy/world.py:judge --limit 256 \
  --temperatures 1.0 0.0 --reward-model data/toy/reward_model --reward-on response"
. experiments/rows.sh

prepare toy-data python -m data.toy.world

# --- The base model, only asked to think or to answer
MAX_TOKENS=160 MODEL=data/toy/base THINK_FORMAT=zero_think row toy/toy-prompted-think needs toy-data
MAX_TOKENS=160 MODEL=data/toy/base THINK_FORMAT=zero_plain row toy/toy-prompted-plain needs toy-data

# --- Warm start
row toy/toy-sft-think needs toy-data sft --preset toy
row toy/toy-sft-plain needs toy-data sft --preset toy --think-format plain

# --- GRPO
row toy/toy-rlmt from toy-sft-think grpo $RL $STEPS
row toy/toy-rlhf from toy-sft-plain grpo $RL $STEPS --think-format plain

# --- DPO
row toy/toy-rlmt-dpo from toy-sft-think dpo $RL
row toy/toy-rlhf-dpo from toy-sft-plain dpo $RL --think-format plain

# --- PPO
row toy/toy-rlmt-ppo from toy-sft-think ppo $RL $STEPS
row toy/toy-rlhf-ppo from toy-sft-plain ppo $RL $STEPS --think-format plain

# --- Zero: GRPO from the base model
# This base model thinks aloud whatever it is asked. So without thinking no completion has the format, and all are cut
# off: --allow-truncation lets the run go on.
MAX_TOKENS=160 row toy/toy-rlmt-zero needs toy-data grpo $RL $STEPS --model data/toy/base --think-format zero_think --allow-truncation --max-prompt-tokens 256 --max-completion-tokens 160
MAX_TOKENS=160 row toy/toy-rlhf-zero needs toy-data grpo $RL $STEPS --model data/toy/base --think-format zero_plain --allow-truncation --max-prompt-tokens 256 --max-completion-tokens 160

# --- Other mixtures of prompts
prepare toy-data-small-budgets python -m data.toy.world --out "$RESULTS/data-small-budgets" --budgets 11 14
row toy/toy-rlmt-small-budgets from toy-sft-think needs toy-data-small-budgets grpo $RL $STEPS --prompts "$RESULTS/data-small-budgets/rl_prompts.jsonl"
prepare toy-data-large-budgets python -m data.toy.world --out "$RESULTS/data-large-budgets" --budgets 17 20
row toy/toy-rlmt-large-budgets from toy-sft-think needs toy-data-large-budgets grpo $RL $STEPS --prompts "$RESULTS/data-large-budgets/rl_prompts.jsonl"

# --- A teacher that slips half as often
prepare toy-data-careful python -m data.toy.world --out "$RESULTS/data-careful" --slips 0.5
row toy/toy-sft-think-careful needs toy-data needs toy-data-careful sft --preset toy --traces "$RESULTS/data-careful/sft_traces.jsonl"
row toy/toy-sft-plain-careful needs toy-data needs toy-data-careful sft --preset toy --traces "$RESULTS/data-careful/sft_traces.jsonl" --think-format plain
row toy/toy-rlmt-careful from toy-sft-think-careful needs toy-data-careful grpo $RL $STEPS
row toy/toy-rlhf-careful from toy-sft-plain-careful needs toy-data-careful grpo $RL $STEPS --think-format plain

# --- Weaker reward models
prepare toy-reward-medium-rm needs toy-data makes "$RESULTS/reward-medium-rm/model.safetensors" python -m data.toy.models reward --base data/toy/base --batch 12 --steps 150 --out "$RESULTS/reward-medium-rm"
row toy/toy-rlmt-medium-rm from toy-sft-think needs toy-reward-medium-rm grpo $RL $STEPS --reward-model "$RESULTS/reward-medium-rm"
row toy/toy-rlhf-medium-rm from toy-sft-plain needs toy-reward-medium-rm grpo $RL $STEPS --reward-model "$RESULTS/reward-medium-rm" --think-format plain
prepare toy-reward-weak-rm needs toy-data python train_reward.py --preset toy --out "$RESULTS/reward-weak-rm" --resume
row toy/toy-rlmt-weak-rm from toy-sft-think needs toy-reward-weak-rm grpo $RL $STEPS --reward-model "$RESULTS/reward-weak-rm/model"
row toy/toy-rlhf-weak-rm from toy-sft-plain needs toy-reward-weak-rm grpo $RL $STEPS --reward-model "$RESULTS/reward-weak-rm/model" --think-format plain
