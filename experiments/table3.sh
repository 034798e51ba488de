# Table 3: DPO and PPO, from the warm starts of table1.sh; two algorithms beside GRPO.
#
# The paper's README reports about 8 H100-hours for DPO, without the sampling, and 62 for PPO; none was measured here.
set -euo pipefail
. experiments/rows.sh

DPO="dpo --preset paper$AS_RELEASED"
for model in llama3.1-8b qwen2.5-7b llama3.1-8b-instruct qwen2.5-7b-instruct; do
  case $model in # released values of PPO are known for one model alone
    llama3.1-8b) PPO="ppo --preset paper$AS_RELEASED" ;;
    qwen2.5-7b) PPO="ppo --preset paper" ;;
    *)
      PPO="ppo --preset paper-instruct"
      row "table3/$model-released" as "table1/$model-released"
      ;;
  esac
  row "table3/$model-sft-plain" as "table1/$model-sft-plain"
  row "table3/$model-sft-think" as "table1/$model-sft-think"
  row "table3/$model-rlhf-dpo" from "$model-sft-plain" $DPO --think-format plain
  row "table3/$model-rlmt-dpo" from "$model-sft-think" $DPO
  row "table3/$model-rlhf-ppo" from "$model-sft-plain" $PPO --think-format plain
  row "table3/$model-rlmt-ppo" from "$model-sft-think" $PPO
done

# --- Zero: an instruction instead of SFT
for base in meta-llama/Llama-3.1-8B Qwen/Qwen2.5-7B; do
  case $base in
    Qwen/*) model=qwen2.5-7b ;;
    *) model=llama3.1-8b ;;
  esac
  row "table3/$model-prompted-plain" as "table1/$model-prompted-plain"
  row "table3/$model-prompted-think" as "table1/$model-prompted-think"
  row "table3/$model-rlhf-zero-dpo" $DPO --model "$base" --think-format zero_plain
  row "table3/$model-rlmt-zero-dpo" $DPO --model "$base" --think-format zero_think
  row "table3/$model-rlhf-zero-ppo" ppo --preset paper-zero --model "$base" --think-format zero_plain
  row "table3/$model-rlmt-zero-ppo" ppo --preset paper-zero --model "$base"
done
