# The whole method on the toy world, on two CPU cores, in some minutes: bash experiments/demo.sh, or `make demo`.
#
# SFT with and without thinking from the shipped base model; GRPO, PPO and DPO with thinking (RLMT) and without (RLHF); the
# reward on thinking and response instead of the response; and an evaluation by the gold checklist, which neither policy
# nor reward model ever sees. An interrupted demo goes on where it was.
#
# Writes into $RESULTS: table.md, differences.md, table.csv, curves.csv and curves.png; runs/ has the run folders, and
# runs/logs/ what each command printed. SEEDS="0 1 2" trains all of it three times, for intervals over seeds.
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
: "${RESULTS:=results/my-demo}" "${LANES:=2}" "${SEEDS:=0}"
: "${STEPS:=9}" # of GRPO and PPO, 128 completions each; DPO has two rounds of 1,024
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 # one core a command; nothing is downloaded
export RUNS="$RESULTS/runs" LOGS="$RESULTS/runs/logs" RL="--preset toy --steps $STEPS"
EVALUATE="eval_wildbench.py --tasks data/toy/benchmark_tasks.jsonl --judge data/toy/world.py:judge --max-tokens 128 \
  --temperatures 1.0 --limit 128 --samples 4 --batch-size 256 --reward-model data/toy/reward_model --reward-on response"

# Runs the lines that it reads, NAME SCRIPT FLAGS, with each seed, $LANES at a time; each goes to $RUNS/NAME-s$seed
run_lines() {
  while read -r line; do
    for seed in $SEEDS; do
      printf '%s\0' "$seed $line"
    done
  done | xargs -0 -n 1 -P "$LANES" bash -c 'run_line $0'
}
run_line() {
  local seed=$1 name=$2-s$1
  local think="--model $RUNS/sft-think-s$seed/model" plain="--model $RUNS/sft-plain-s$seed/model --think-format plain"
  if eval "python ${*:3} --seed $seed --out \"$RUNS/$name\" --resume" > "$LOGS/$name.log" 2>&1; then
    echo "$(date +%T) $name is done"
  else
    tail -n 30 "$LOGS/$name.log" >&2
    echo "$name failed; its log is $LOGS/$name.log. The same command goes on from here." >&2
    return 255 # xargs starts nothing more
  fi
}
export -f run_line
mkdir -p "$LOGS"
echo "$(date +%T) $LANES commands at a time; what they print goes to $LOGS/"

python -m data.toy.world

# --- 1. warm start
run_lines <<'END'
sft-think train_sft_warmstart.py --preset toy --epochs 1
sft-plain train_sft_warmstart.py --preset toy --epochs 1 --think-format plain
END

# --- 2. RL with the shipped reward model, the longest first; and a reward model of our own, to measure
run_lines <<'END'
ppo-think train_ppo.py $RL $think --reward-on response
grpo-think-whole train_grpo.py $RL $think --reward-on think+response
grpo-think train_grpo.py $RL $think --reward-on response
dpo-think train_dpo.py --preset toy $think --reward-on response
ppo-plain train_ppo.py $RL $plain --reward-on response
dpo-plain train_dpo.py --preset toy $plain --reward-on response
grpo-plain train_grpo.py $RL $plain --reward-on response
reward train_reward.py --preset toy --epochs 0.5
END

# --- 3. evaluation: four answers to each of 128 tasks
for name in sft-think sft-plain grpo-think grpo-plain grpo-think-whole ppo-think ppo-plain dpo-think dpo-plain; do
  echo "eval-$name $EVALUATE --model $RUNS/$name-s\$seed/model"
done | run_lines

# --- 4. table and curves
python -m experiments.compare "$RESULTS"
echo "$(date +%T) table, csv and picture are in $RESULTS/; completions to read in a browser: $RUNS/*/page.html"
echo "python page.py FOLDER FOLDER writes such a page of two runs or evaluations, side by side"
