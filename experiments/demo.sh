# The whole method on the toy world, on two CPU cores, in some minutes: bash experiments/demo.sh, or `make demo`.
#
# SFT with and without thinking from the shipped base model; GRPO, PPO and DPO with thinking (RLMT) and without (RLHF); the
# reward on thinking and response instead of the response; and an evaluation by the gold checklist, which neither policy
# nor reward model ever sees. An interrupted demo goes on where it was.
#
# Writes into $RESULTS: table.md, table.csv, curves.csv, curves.png, overoptimisation.png; runs/ has the run folders, and
# runs/logs/ what each command printed.
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
: "${RESULTS:=results/demo}" "${LANES:=2}"
: "${STEPS:=14}" # of GRPO and PPO, 128 completions each; DPO has two rounds of 1,024
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 # one core a command; nothing is downloaded
export RUNS="$RESULTS/runs" LOGS="$RESULTS/runs/logs" RL="--preset toy --steps $STEPS"
export EVALUATE="python eval_wildbench.py --max-tokens 128 --temperatures 1.0 0.0 --reward-model data/toy/reward_model \
  --reward-on response"

# Runs the commands that it reads, one a line, $LANES at a time. A line ends with: --out "$RUNS/NAME" --resume
run_lines() {
  tr '\n' '\0' | xargs -0 -n 1 -P "$LANES" bash -c 'run_line "$0"'
}
run_line() {
  local name=${1%\" --resume}
  name=${name##*/}
  if bash -c "$1" > "$LOGS/$name.log" 2>&1; then
    echo "[$(($(date +%s) - BEGAN)) s] $name is done"
  else
    tail -n 30 "$LOGS/$name.log" >&2
    echo "$name failed; its log is $LOGS/$name.log. The same command goes on from here." >&2
    return 255 # xargs starts nothing more
  fi
}
export -f run_line
mkdir -p "$LOGS"
BEGAN=$(date +%s)
export BEGAN
echo "$LANES commands at a time; what they print goes to $LOGS/"

python -m data.toy.world

# --- 1. warm start, and a reward model to measure
run_lines <<'END'
python train_sft_warmstart.py --preset toy --out "$RUNS/sft-think" --resume
python train_sft_warmstart.py --preset toy --think-format plain --out "$RUNS/sft-plain" --resume
python train_reward.py --preset toy --out "$RUNS/reward" --resume
END

# --- 2. RL, the longest first, with the shipped reward model
run_lines <<'END'
python train_grpo.py $RL --model "$RUNS/sft-think/model" --seed 0 --reward-on think+response --out "$RUNS/grpo-think-whole" --resume
python train_ppo.py $RL --model "$RUNS/sft-think/model" --seed 0 --reward-on response --out "$RUNS/ppo-think" --resume
python train_grpo.py $RL --model "$RUNS/sft-think/model" --seed 0 --reward-on response --out "$RUNS/grpo-think-s0" --resume
python train_grpo.py $RL --model "$RUNS/sft-think/model" --seed 1 --reward-on response --out "$RUNS/grpo-think-s1" --resume
python train_dpo.py --preset toy --model "$RUNS/sft-think/model" --seed 0 --reward-on response --out "$RUNS/dpo-think" --resume
python train_ppo.py $RL --think-format plain --model "$RUNS/sft-plain/model" --seed 0 --reward-on response --out "$RUNS/ppo-plain" --resume
python train_grpo.py $RL --think-format plain --model "$RUNS/sft-plain/model" --seed 0 --reward-on response --out "$RUNS/grpo-plain-s0" --resume
python train_grpo.py $RL --think-format plain --model "$RUNS/sft-plain/model" --seed 1 --reward-on response --out "$RUNS/grpo-plain-s1" --resume
python train_dpo.py --preset toy --think-format plain --model "$RUNS/sft-plain/model" --seed 0 --reward-on response --out "$RUNS/dpo-plain" --resume
END

# --- 3. evaluation: 256 tasks for SFT and GRPO, whose difference is the result; the first 128 of them for the others
run_lines <<'END'
$EVALUATE --limit 256 --model "$RUNS/sft-think/model" --out "$RUNS/eval-sft-think" --resume
$EVALUATE --limit 256 --model "$RUNS/sft-plain/model" --out "$RUNS/eval-sft-plain" --resume
$EVALUATE --limit 256 --model "$RUNS/grpo-think-s0/model" --out "$RUNS/eval-grpo-think-s0" --resume
$EVALUATE --limit 256 --model "$RUNS/grpo-think-s1/model" --out "$RUNS/eval-grpo-think-s1" --resume
$EVALUATE --limit 256 --model "$RUNS/grpo-plain-s0/model" --out "$RUNS/eval-grpo-plain-s0" --resume
$EVALUATE --limit 256 --model "$RUNS/grpo-plain-s1/model" --out "$RUNS/eval-grpo-plain-s1" --resume
$EVALUATE --limit 128 --model "$RUNS/grpo-think-whole/model" --out "$RUNS/eval-grpo-think-whole" --resume
$EVALUATE --limit 128 --model "$RUNS/ppo-think/model" --out "$RUNS/eval-ppo-think" --resume
$EVALUATE --limit 128 --model "$RUNS/ppo-plain/model" --out "$RUNS/eval-ppo-plain" --resume
$EVALUATE --limit 128 --model "$RUNS/dpo-think/model" --out "$RUNS/eval-dpo-think" --resume
$EVALUATE --limit 128 --model "$RUNS/dpo-plain/model" --out "$RUNS/eval-dpo-plain" --resume
END

# --- 4. table and curves
python -m experiments.demo_tables --results "$RESULTS"
echo "$((($(date +%s) - BEGAN + 30) / 60)) minutes; table, csv and pictures are in $RESULTS/"
