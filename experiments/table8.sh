# Table 8: four more benchmarks for the models of table1.sh and table3.sh.
set -euo pipefail
BENCHMARKS="ifeval wildbench-g math500 zebralogic"
. experiments/rows.sh

MAX_TOKENS=4096 MODEL=meta-llama/Llama-3.1-8B-Instruct row table8/llama3.1-8b-instruct-released
MAX_TOKENS=4096 MODEL=Qwen/Qwen2.5-7B-Instruct row table8/qwen2.5-7b-instruct-released
for model in llama3.1-8b qwen2.5-7b llama3.1-8b-instruct qwen2.5-7b-instruct; do
  for way in sft-plain sft-think rlhf-dpo rlmt-dpo rlhf-ppo rlmt-ppo rlhf rlmt; do
    row "table8/$model-$way"
  done
done
