# One card: warm start and GRPO of a small model, with thinking (rlmt) and without (rlhf), and benchmarks that need no judge.
# Reward models that nothing is trained on score the answers to WildBench, and along GRPO (gold) those to held-out prompts.
#
#   python reproduce.py --table 1gpu --run                                           # Qwen2.5-1.5B on 24 GB
#   python reproduce.py --table 1gpu --run --dry-run                                 # its checks only
#   CARD=80gb MODEL=meta-llama/Llama-3.2-1B python reproduce.py --table 1gpu --run   # or a folder
#   TRACES=MY.jsonl PROMPTS=MY.csv GOLD_FLAGS= python reproduce.py --table 1gpu --run
#   BENCHMARKS= python reproduce.py --table 1gpu --run                               # without evaluations
#   GRPO_FLAGS="--steps 60" GOLD_FLAGS="--gold judge:MODEL --gold-prompts FILE" python reproduce.py --table 1gpu --run
#
# docs/one-gpu.md has the commands that make its inputs. Nothing of it has run on a GPU yet.
set -euo pipefail
: "${CARD:=24gb}" "${MODEL:=Qwen/Qwen2.5-1.5B}"
: "${TRACES:=data/traces.jsonl}" "${PROMPTS:=data/wildchat_if.jsonl}"
: "${BENCHMARKS=wildbench-rm ifeval popqa ifbench mmlu_redux}" # names that evaluate.sh knows; the judges of the others cost money
: "${GRPO_FLAGS:=}" # of both runs of GRPO, like these; empty: no gold
: "${GOLD_FLAGS=--gold Skywork/Skywork-Reward-V2-Llama-3.2-1B --gold-prompts data/wildchat_if_val.jsonl}"
: "${REPORT_TO:=none}" # or wandb, trackio, tensorboard
: "${LAUNCH:=python}"
case $CARD/$MODEL in # how the warm start fits the card
  24gb/*Qwen2.5-0.5B) fit="--learning-rate 1e-5" ;;
  24gb/*Llama-3.2-1B) fit="--optim adamw_8bit --learning-rate 1e-5" ;;
  *) fit="--preset $CARD" ;;
esac
SFT="sft $fit --model $MODEL --traces $TRACES --report-to $REPORT_TO"
GRPO="grpo --preset $CARD --prompts $PROMPTS --report-to $REPORT_TO $GRPO_FLAGS"
name=1gpu/$CARD-${MODEL##*/}
. experiments/rows.sh

row "$name-sft-think" $SFT
row "$name-sft-plain" $SFT --think-format plain
row "$name-rlmt" from "${name#*/}-sft-think" $GRPO
row "$name-rlhf" from "${name#*/}-sft-plain" $GRPO --think-format plain
