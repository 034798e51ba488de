# Table 4: other prompts, another teacher of the warm start, other reward models. The warm starts are those of table1.sh.
set -euo pipefail
. experiments/rows.sh

row table4/llama3.1-8b-rlmt as table1/llama3.1-8b-rlmt
row table4/llama3.1-8b-rlmt-ultrafeedback from llama3.1-8b-sft-think grpo --preset paper$AS_RELEASED --prompts data/ultrafeedback.jsonl
row table4/llama3.1-8b-rlmt-tulu3 from llama3.1-8b-sft-think grpo --preset paper$AS_RELEASED --prompts data/tulu3_random.jsonl
row table4/llama3.1-8b-sft-plain-gpt4.1mini sft --model meta-llama/Llama-3.1-8B --think-format plain --traces data/traces_gpt4.1mini.jsonl
row table4/llama3.1-8b-sft-think-gpt4.1mini sft --model meta-llama/Llama-3.1-8B --traces data/traces_gpt4.1mini.jsonl
row table4/llama3.1-8b-rlhf-gpt4.1mini from llama3.1-8b-sft-plain-gpt4.1mini grpo --preset paper$AS_RELEASED --think-format plain
row table4/llama3.1-8b-rlmt-gpt4.1mini from llama3.1-8b-sft-think-gpt4.1mini grpo --preset paper$AS_RELEASED
row table4/llama3.1-8b-rlhf-skywork-v2 from llama3.1-8b-sft-plain grpo --preset paper$AS_RELEASED --think-format plain --reward-model Skywork/Skywork-Reward-V2-Llama-3.1-8B
row table4/llama3.1-8b-rlmt-skywork-v2 from llama3.1-8b-sft-think grpo --preset paper$AS_RELEASED --reward-model Skywork/Skywork-Reward-V2-Llama-3.1-8B

# --- ArmoRM: examples/armorm.py computes its score from the published weights. `python -m examples.armorm` first
# compares that with the model card; it has been tried on tiny weights alone.
row table4/llama3.1-8b-rlhf-armorm from llama3.1-8b-sft-plain grpo --preset paper$AS_RELEASED --think-format plain --rewards examples/armorm.py:armorm:1 ${AS_RELEASED:+--learning-rate 3e-7}
row table4/llama3.1-8b-rlmt-armorm from llama3.1-8b-sft-think grpo --preset paper$AS_RELEASED --rewards examples/armorm.py:armorm:1 ${AS_RELEASED:+--learning-rate 3e-7}
