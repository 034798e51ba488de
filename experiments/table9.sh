# Table 9: a model that was trained to reason about mathematics, before and after RLMT, beside models of table1.sh.
set -euo pipefail
BENCHMARKS="wildbench alpacaeval2 arenahard2 creativewriting3"
. experiments/rows.sh

row table9/llama3.1-8b-rlmt
row table9/qwen2.5-7b-rlmt
row table9/llama3.1-8b-instruct-rlmt
row table9/qwen2.5-7b-instruct-rlmt

# --- models of others, trained to reason about mathematics
MODEL=deepseek-ai/DeepSeek-R1-Distill-Llama-8B row table9/r1-distill-llama-8b-released
MODEL=hkust-nlp/Qwen-2.5-7B-SimpleRL-Zoo row table9/qwen2.5-7b-simplerl-zoo-released
MODEL=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B row table9/r1-distill-qwen-7b-released
THINK_FORMAT=think MODEL=open-thoughts/OpenThinker2-7B row table9/openthinker2-7b-released
row table9/openthinker2-7b-rlmt grpo --preset paper $AS_RELEASED --model open-thoughts/OpenThinker2-7B $GOLD_FLAGS
