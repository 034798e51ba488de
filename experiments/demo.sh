# The whole method on the toy world, on two CPU cores, in a few minutes: bash experiments/demo.sh, or `make demo`.
#
# SFT with thinking and without, from the shipped base model; GRPO from each, with the reward model's score of thinking and
# response; an evaluation of the four by the hidden checklist, on which nothing is trained. An interrupted demo continues
# where it stopped.
#
#     ALGORITHMS="grpo ppo dpo response reward" SEEDS="0 1 2" make demo
#
# also trains by PPO and by DPO, by GRPO with the reward on the response only, and a reward model of our own; three times.
#
# Writes into $RESULTS: table.md, differences.md, table.csv, curves.csv and curves.png. runs/ has the run folders, and
# runs/logs/ what each command printed.
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
: "${RESULTS:=results/my-demo}" "${LANES:=2}" "${SEEDS:=0}" "${ALGORITHMS:=grpo}"
: "${STEPS:=9}" # of GRPO and PPO, 128 completions each; DPO has two rounds of 1,024
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 # one core per command; nothing is downloaded
export RUNS="$RESULTS/runs" LOGS="$RESULTS/runs/logs" RL="--preset toy --steps $STEPS"
export EVALUATE="eval_wildbench.py --tasks data/toy/benchmark_tasks.jsonl --judge data/toy/world.py:judge --max-tokens 128 \
  --temperatures 1.0 --limit 128 --samples 4 --batch-size 256 --reward-model data/toy/reward_model"

# --- 1. warm start. A line is NAME SECONDS COMMAND; the seconds are rough, for the estimate of what is left
lines='sft-think 60 train_sft_warmstart.py --preset toy --epochs 0.6
sft-plain 45 train_sft_warmstart.py --preset toy --epochs 0.6 --think-format plain'

# --- 2. RL with the shipped reward model; $think and $plain start from the SFT run of the same seed
for algorithm in $ALGORITHMS; do
  case $algorithm in
  grpo) lines+='
grpo-plain 55 train_grpo.py $RL $plain
grpo-think 80 train_grpo.py $RL $think' ;;
  ppo) lines+='
ppo-plain 70 train_ppo.py $RL $plain
ppo-think 100 train_ppo.py $RL $think' ;;
  dpo) lines+='
dpo-plain 70 train_dpo.py --preset toy $plain
dpo-think 95 train_dpo.py --preset toy $think' ;;
  response) lines+='
grpo-think-response 80 train_grpo.py $RL $think --reward-on response' ;;
  reward) lines+='
reward 60 train_reward.py --preset toy --epochs 0.5' ;;
  *) echo "ALGORITHMS: $algorithm is none of grpo ppo dpo response reward" >&2 && exit 2 ;;
  esac
done

# --- 3. evaluation: four answers to each of 128 tasks
for name in $(cut -d' ' -f1 <<< "$lines" | grep -v reward); do
  lines+="
eval-$name 20 \$EVALUATE --model \$RUNS/$name-s\$seed/model"
done

# Runs a line with a seed, when the runs that it names are finished; its folder is $RUNS/NAME-s$seed
run_line() {
  local seed=$1 name=$2-s$1 seconds=$3 command=${*:4} needed
  local think="--model $RUNS/sft-think-s$seed/model" plain="--model $RUNS/sft-plain-s$seed/model --think-format plain"
  command=$(eval "echo \"$command\"")
  for needed in $(grep -o "$RUNS/[^ ]*/model" <<< "$command"); do
    until [ -e "${needed%/model}/summary.json" ]; do
      if [ -e "$LOGS/failed" ]; then return 255; fi
      sleep 0.5
    done
  done
  if python $command --seed "$seed" --out "$RUNS/$name" --resume > "$LOGS/$name.log" 2>&1; then
    echo "$seconds $SECONDS" >> "$LOGS/done"
    awk -v all="$ALL" -v lanes="$LANES" -v line="$(date +%T) $name is done" '
      {rough += $1; real += $2}
      END {printf "%s; about %.1f minutes are left\n", line, (all - rough) * real / rough / lanes / 60}' "$LOGS/done"
  else
    touch "$LOGS/failed"
    tail -n 30 "$LOGS/$name.log" >&2
    echo "$name failed; its log is $LOGS/$name.log. The same command continues from here." >&2
    return 255 # xargs starts nothing more
  fi
}
export -f run_line
mkdir -p "$LOGS"
rm -f "$LOGS/done" "$LOGS/failed"
python -m data.toy.world

# every line with each seed, without the finished ones
todo=$(while read -r name line; do for seed in $SEEDS; do
  [ -e "$RUNS/$name-s$seed/summary.json" ] || echo "$seed $name $line"
done; done <<< "$lines")
ALL=$(awk '{seconds += $3} END {print seconds}' <<< "$todo")
export ALL LANES
echo "$(date +%T) $(grep -c . <<< "$todo" || true) commands, $LANES at a time; what they print goes to $LOGS/"
if [ -n "$todo" ]; then
  tr '\n' '\0' <<< "$todo" | xargs -0 -n 1 -P "$LANES" bash -c 'run_line $0'
fi

# --- 4. table and curves
python -m experiments.compare "$RESULTS"
echo "$(date +%T) table, csv and picture are in $RESULTS/; completions to read in a browser: $RUNS/*/page.html"
echo "python page.py FOLDER FOLDER writes such a page of two runs or evaluations, side by side"
