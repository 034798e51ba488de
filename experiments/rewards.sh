# Other rewards on the toy world, in about an hour on two CPU cores: verifiers, shaping, unsupervised and dense rewards, judges,
# and RLVER's simulated users.
set -euo pipefail
: "${RESULTS:=results/toy}" "${LAUNCH:=python}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 # one core per command; nothing is downloaded
GOLD_FLAGS= # every run here has a gold of its own
SUMS="--preset toy --prompts data/toy/sums_prompts.jsonl --steps 20 --gold data/toy/tasks.py:gold"
CODE="--preset toy --prompts data/toy/code_prompts.jsonl --steps 15 --gold data/toy/tasks.py:gold --rewards code:1"
RUBRICS="--preset toy --prompts data/toy/rubric_prompts.jsonl --steps 14 --judge toy-judge"
USERS="--preset toy --steps 25"
TASKS="python eval_wildbench.py --limit 256 --temperatures 1.0 0.0"
. experiments/rows.sh

prepare toy-tasks needs toy-data python -m data.toy.tasks
prepare toy-users needs toy-data python -m rlver.toy_users
prepare toy-judge needs toy-data python -m data.toy.judge

# --- Sums, where a verifier knows what is right
EVALUATE="$TASKS --tasks data/toy/sums_tasks.jsonl --judge data/toy/tasks.py:judge"
row rewards/toy-sft-think-sums needs toy-tasks sft --preset toy --traces data/toy/sums_traces.jsonl --epochs 2
row rewards/toy-sft-plain-sums needs toy-tasks sft --preset toy --traces data/toy/sums_traces.jsonl --epochs 2 --think-format plain
row rewards/toy-rlvr-think from toy-sft-think-sums grpo $SUMS --rewards math:1
row rewards/toy-rlvr-plain from toy-sft-plain-sums grpo $SUMS --rewards math:1 --think-format plain

# --- Shaped
row rewards/toy-rlvr-think-format from toy-sft-think-sums grpo $SUMS --rewards math:1 format:0.2 --on-bad-format score
row rewards/toy-rlvr-think-shaped from toy-sft-think-sums grpo $SUMS --rewards math:1 length:0.2 repetition:0.1 overlong:1 format:gate --on-bad-format score

# --- Without a verifier
row rewards/toy-rlvr-think-majority from toy-sft-think-sums grpo $SUMS --rewards majority:1
row rewards/toy-rlvr-think-certainty from toy-sft-think-sums grpo $SUMS --rewards self_certainty:1

# --- Rewards on steps and tokens
row rewards/toy-rlvr-think-process from toy-sft-think-sums grpo $SUMS --rewards math:1 process:0.5 --reward-args process.model=data/toy/tasks.py:steps
row rewards/toy-rlvr-think-prime from toy-sft-think-sums grpo $SUMS --rewards math:1 prime:1 --reward-args prime.learning_rate=1e-4 --scale-rewards none

# --- PPO
row rewards/toy-rlvr-think-ppo from toy-sft-think-sums ppo $SUMS --rewards math:1
row rewards/toy-rlvr-think-ppo-process from toy-sft-think-sums ppo $SUMS --rewards math:1 process:0.5 --reward-args process.model=data/toy/tasks.py:steps

# --- Programs, which tests run
EVALUATE="$TASKS --tasks data/toy/code_tasks.jsonl --judge data/toy/tasks.py:judge"
prepare toy-code-base makes "$RESULTS/code-base/model.safetensors" python -m data.toy.tasks --base-out "$RESULTS/code-base"
row rewards/toy-sft-think-code needs toy-tasks needs toy-code-base sft --preset toy --traces data/toy/code_traces.jsonl --epochs 2 --model "$RESULTS/code-base"
row rewards/toy-sft-plain-code needs toy-tasks needs toy-code-base sft --preset toy --traces data/toy/code_traces.jsonl --epochs 2 --think-format plain --model "$RESULTS/code-base"
row rewards/toy-rlvr-think-code from toy-sft-think-code grpo $CODE
row rewards/toy-rlvr-plain-code from toy-sft-plain-code grpo $CODE --think-format plain

# --- Rubrics and a judge
EVALUATE="$TASKS --tasks data/toy/benchmark_tasks.jsonl --judge data/toy/world.py:judge"
row rewards/toy-sft-think as toy/toy-sft-think
row rewards/toy-rlmt as toy/toy-rlmt
LAUNCH="python -m data.toy.judge -- python" row rewards/toy-rubric-think from toy-sft-think needs toy-judge grpo $RUBRICS --rewards rubric:1
LAUNCH="python -m data.toy.judge -- python" row rewards/toy-rubric-think-judge from toy-sft-think needs toy-judge grpo $RUBRICS --rewards judge_mark:1

# --- Users with moods
EVALUATE="python eval_sentient.py --profiles data/toy/users_test.jsonl --protocol rlver --simulator rlver/toy_users.py:user \
  --held-out-simulator rlver/toy_users.py:held_out_user --start 40 --turns 3 --low 10 --temperature 1 \
  --judge rlver/toy_users.py:strategies"
MAX_TOKENS=48
row rewards/toy-sft-think-users needs toy-users sft --preset toy --traces data/toy/users_traces.jsonl --epochs 2
row rewards/toy-sft-plain-users needs toy-users sft --preset toy --traces data/toy/users_traces.jsonl --epochs 2 --think-format plain
row rewards/toy-rlver-think from toy-sft-think-users rlver $USERS
row rewards/toy-rlver-plain from toy-sft-plain-users rlver $USERS --think-format plain
row rewards/toy-rlver-think-ppo from toy-sft-think-users rlver $USERS --algorithm ppo --prompts-per-step 128
row rewards/toy-rlver-think-turns from toy-sft-think-users rlver $USERS --turn-weight 1
row rewards/toy-rlver-think-ppo-turns from toy-sft-think-users rlver $USERS --algorithm ppo --prompts-per-step 128 --turn-weight 1
row rewards/toy-rlver-think-challenging from toy-sft-think-users rlver $USERS --user challenging
row rewards/toy-rlver-plain-challenging from toy-sft-plain-users rlver $USERS --user challenging --think-format plain
