# What RLVER forgets: MATH500 and IFEval before and after training with a simulated user, as in table 2 of 2507.03112 (whose third
# column, LiveCodeBench, is no benchmark of ours).
#
# SIMULATOR="--simulator MODEL --simulator-url http://HOST:8000/v1" plays the users; data/README.md says where data/profiles.jsonl comes from.
set -euo pipefail
: "${SIMULATOR:=}"
BENCHMARKS="math500 ifeval"
. experiments/rows.sh

MAX_TOKENS=4096 MODEL=Qwen/Qwen2.5-7B-Instruct row rlver/qwen2.5-7b-instruct-released
row rlver/qwen2.5-7b-rlver-think rlver --preset rlver-think $SIMULATOR
row rlver/qwen2.5-7b-rlver-plain rlver --preset rlver-plain --think-format plain $SIMULATOR
row rlver/qwen2.5-7b-rlver-think-ppo rlver --preset rlver-think --algorithm ppo --steps 350 $SIMULATOR
row rlver/qwen2.5-7b-rlver-plain-ppo rlver --preset rlver-plain --think-format plain --algorithm ppo --steps 350 $SIMULATOR
