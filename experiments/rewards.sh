# Other rewards on the toy world: verifiers, unsupervised, shaped and dense rewards, rubrics and a judge, users with moods.
#
# toy-sft-think and toy-rlmt are in toy.sh: run that first, or at least those two blocks.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
: "${SEED:=0}" "${RESULTS:=results/toy}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 # one core a command; nothing is downloaded
SUMS="--preset toy --prompts data/toy/sums_prompts.jsonl --steps 20 --gold data/toy/sums.py:gold"
CODE="--preset toy --prompts data/toy/code_prompts.jsonl --steps 15 --gold data/toy/programs.py:gold --rewards code:1"
RUBRICS="--preset toy --prompts data/toy/rubric_prompts.jsonl --steps 14 --judge toy-judge"
USERS="--preset toy --steps 25"
EVALUATE="python eval_wildbench.py --limit 256 --temperatures 1.0 0.0 --max-tokens 128"
EVALUATE_SUMS="$EVALUATE --tasks data/toy/sums_tasks.jsonl --judge data/toy/sums.py:judge"
EVALUATE_CODE="$EVALUATE --tasks data/toy/code_tasks.jsonl --judge data/toy/programs.py:judge"
EVALUATE_RUBRICS="$EVALUATE --tasks data/toy/benchmark_tasks.jsonl --judge data/toy/world.py:judge"
EVALUATE_USERS="python eval_sentient.py --profiles data/toy/users_test.jsonl --protocol rlver --simulator data/toy/users.py:user \
  --held-out-simulator data/toy/users.py:held_out_user --start 40 --turns 3 --low 10 --max-tokens 48 --temperature 1 \
  --judge data/toy/users.py:strategies"

# stage: reward-data
# needs: toy-data
python -m data.toy.sums
python -m data.toy.programs
python -m data.toy.users
python -m data.toy.judge

# --- Sums, where a verifier knows what is right

# row: rewards/toy-sft-think-sums
# needs: reward-data
python train_sft_warmstart.py --preset toy --traces data/toy/sums_traces.jsonl --epochs 2 \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-sums-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-sums-s$SEED--gold" --resume

# row: rewards/toy-sft-plain-sums
# needs: reward-data
python train_sft_warmstart.py --preset toy --traces data/toy/sums_traces.jsonl --epochs 2 --think-format plain \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-sums-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-sft-plain-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-sums-s$SEED--gold" --resume

# row: rewards/toy-rlvr-think
# needs: rewards/toy-sft-think-sums
python train_grpo.py $SUMS --rewards math:1 --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-s$SEED--gold" --resume

# row: rewards/toy-rlvr-plain
# needs: rewards/toy-sft-plain-sums
python train_grpo.py $SUMS --rewards math:1 --think-format plain --model "$RESULTS/toy-sft-plain-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-plain-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-plain-s$SEED--gold" --resume

# --- Shaped

# row: rewards/toy-rlvr-think-format
# needs: rewards/toy-sft-think-sums
python train_grpo.py $SUMS --rewards math:1 format:0.2 --on-bad-format score \
  --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-format-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-format-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-format-s$SEED--gold" --resume

# row: rewards/toy-rlvr-think-shaped
# needs: rewards/toy-sft-think-sums
python train_grpo.py $SUMS --rewards math:1 length:0.2 repetition:0.1 overlong:soft format:gate --on-bad-format score \
  --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-shaped-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-shaped-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-shaped-s$SEED--gold" --resume

# --- Without a verifier

# row: rewards/toy-rlvr-think-majority
# needs: rewards/toy-sft-think-sums
python train_grpo.py $SUMS --rewards majority:1 --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-majority-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-majority-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-majority-s$SEED--gold" --resume

# row: rewards/toy-rlvr-think-certainty
# needs: rewards/toy-sft-think-sums
python train_grpo.py $SUMS --rewards self_certainty:1 --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-certainty-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-certainty-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-certainty-s$SEED--gold" --resume

# --- Rewards on steps and tokens

# row: rewards/toy-rlvr-think-process
# needs: rewards/toy-sft-think-sums
python train_grpo.py $SUMS --rewards math:1 process:0.5 --reward-args process.model=data/toy/sums.py:steps \
  --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-process-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-process-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-process-s$SEED--gold" --resume

# row: rewards/toy-rlvr-think-prime
# needs: rewards/toy-sft-think-sums
python train_grpo.py $SUMS --rewards math:1 prime:1 --reward-args prime.learning_rate=1e-4 --scale-rewards none \
  --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-prime-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-prime-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-prime-s$SEED--gold" --resume

# --- PPO

# row: rewards/toy-rlvr-think-ppo
# needs: rewards/toy-sft-think-sums
python train_ppo.py $SUMS --rewards math:1 --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-ppo-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-ppo-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-ppo-s$SEED--gold" --resume

# row: rewards/toy-rlvr-think-ppo-process
# needs: rewards/toy-sft-think-sums
python train_ppo.py $SUMS --rewards math:1 process:0.5 --reward-args process.model=data/toy/sums.py:steps \
  --model "$RESULTS/toy-sft-think-sums-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-ppo-process-s$SEED" --resume
$EVALUATE_SUMS --model "$RESULTS/toy-rlvr-think-ppo-process-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-ppo-process-s$SEED--gold" --resume

# --- Programs, which tests run

# stage: toy-code-base
[ -e "$RESULTS/code-base/model.safetensors" ] ||
  python -m data.toy.programs --base-out "$RESULTS/code-base"

# row: rewards/toy-sft-think-code
# needs: reward-data toy-code-base
python train_sft_warmstart.py --preset toy --traces data/toy/code_traces.jsonl --epochs 2 --model "$RESULTS/code-base" \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-code-s$SEED" --resume
$EVALUATE_CODE --model "$RESULTS/toy-sft-think-code-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-code-s$SEED--gold" --resume

# row: rewards/toy-sft-plain-code
# needs: reward-data toy-code-base
python train_sft_warmstart.py --preset toy --traces data/toy/code_traces.jsonl --epochs 2 --think-format plain \
  --model "$RESULTS/code-base" \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-code-s$SEED" --resume
$EVALUATE_CODE --model "$RESULTS/toy-sft-plain-code-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-code-s$SEED--gold" --resume

# row: rewards/toy-rlvr-think-code
# needs: rewards/toy-sft-think-code
python train_grpo.py $CODE --model "$RESULTS/toy-sft-think-code-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-code-s$SEED" --resume
$EVALUATE_CODE --model "$RESULTS/toy-rlvr-think-code-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-think-code-s$SEED--gold" --resume

# row: rewards/toy-rlvr-plain-code
# needs: rewards/toy-sft-plain-code
python train_grpo.py $CODE --think-format plain --model "$RESULTS/toy-sft-plain-code-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-plain-code-s$SEED" --resume
$EVALUATE_CODE --model "$RESULTS/toy-rlvr-plain-code-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlvr-plain-code-s$SEED--gold" --resume

# --- Rubrics and a judge

# row: rewards/toy-sft-think
# needs: toy/toy-sft-think

# row: rewards/toy-rlmt
# needs: toy/toy-rlmt

# row: rewards/toy-rubric-think
# needs: toy/toy-sft-think
python -m data.toy.judge -- python train_grpo.py $RUBRICS --rewards rubric:1 \
  --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rubric-think-s$SEED" --resume
$EVALUATE_RUBRICS --model "$RESULTS/toy-rubric-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rubric-think-s$SEED--gold" --resume

# row: rewards/toy-rubric-think-judge
# needs: toy/toy-sft-think
python -m data.toy.judge -- python train_grpo.py $RUBRICS --rewards judge_mark:1 \
  --model "$RESULTS/toy-sft-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rubric-think-judge-s$SEED" --resume
$EVALUATE_RUBRICS --model "$RESULTS/toy-rubric-think-judge-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rubric-think-judge-s$SEED--gold" --resume

# --- Users with moods

# row: rewards/toy-sft-think-users
# needs: reward-data
python train_sft_warmstart.py --preset toy --traces data/toy/users_traces.jsonl --epochs 2 \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-users-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-sft-think-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-sft-think-users-s$SEED--gold" --resume

# row: rewards/toy-sft-plain-users
# needs: reward-data
python train_sft_warmstart.py --preset toy --traces data/toy/users_traces.jsonl --epochs 2 --think-format plain \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-users-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-sft-plain-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-sft-plain-users-s$SEED--gold" --resume

# row: rewards/toy-rlver-think
# needs: rewards/toy-sft-think-users
python train_rlver.py $USERS --model "$RESULTS/toy-sft-think-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-rlver-think-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-s$SEED--gold" --resume

# row: rewards/toy-rlver-plain
# needs: rewards/toy-sft-plain-users
python train_rlver.py $USERS --think-format plain --model "$RESULTS/toy-sft-plain-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-plain-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-rlver-plain-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-plain-s$SEED--gold" --resume

# row: rewards/toy-rlver-think-ppo
# needs: rewards/toy-sft-think-users
python train_rlver.py $USERS --algorithm ppo --prompts-per-step 128 \
  --model "$RESULTS/toy-sft-think-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-ppo-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-rlver-think-ppo-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-ppo-s$SEED--gold" --resume

# row: rewards/toy-rlver-think-turns
# needs: rewards/toy-sft-think-users
python train_rlver.py $USERS --turn-weight 1 --model "$RESULTS/toy-sft-think-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-turns-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-rlver-think-turns-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-turns-s$SEED--gold" --resume

# row: rewards/toy-rlver-think-ppo-turns
# needs: rewards/toy-sft-think-users
python train_rlver.py $USERS --algorithm ppo --prompts-per-step 128 --turn-weight 1 \
  --model "$RESULTS/toy-sft-think-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-ppo-turns-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-rlver-think-ppo-turns-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-ppo-turns-s$SEED--gold" --resume

# row: rewards/toy-rlver-think-challenging
# needs: rewards/toy-sft-think-users
python train_rlver.py $USERS --user challenging --model "$RESULTS/toy-sft-think-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-challenging-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-rlver-think-challenging-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-think-challenging-s$SEED--gold" --resume

# row: rewards/toy-rlver-plain-challenging
# needs: rewards/toy-sft-plain-users
python train_rlver.py $USERS --user challenging --think-format plain --model "$RESULTS/toy-sft-plain-users-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-plain-challenging-s$SEED" --resume
$EVALUATE_USERS --model "$RESULTS/toy-rlver-plain-challenging-s$SEED/model" \
  --seed "$SEED" --out "$RESULTS/toy-rlver-plain-challenging-s$SEED--gold" --resume
