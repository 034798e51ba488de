# When does thinking pay? docs/study.md has the question, the prediction and what came out.
#
#   python reproduce.py --table order --seeds 0 1 2 --run       # one part of it; what is interrupted goes on with the same command
#   python -m experiments.thinking_use results/study/*--gold    # thinking use of what thinks
#   python -m experiments.compare results/study                 # table and paired differences of all that has run
#
# Each part uses one core: start two of them side by side, but `hack` after `order`, whose SFT it starts from.
set -euo pipefail
: "${RESULTS:=results/study}" "${LAUNCH:=python}"
: "${DTYPE:=bfloat16}" # of SmolLM2's runs; float32 is several times faster on a CPU without avx512_bf16
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 # one core per command; SmolLM2 comes from PyPI, nothing else is downloaded
GOLD_FLAGS= # preset toy has a gold of its own
JUDGED="python eval_wildbench.py --judge data/toy/world.py:judge --limit 128 --temperatures 1.0 0.0 --samples 4 --batch-size 256"
. experiments/rows.sh
MAX_TOKENS=160

# --- 1. order: what must be known before the answer begins: the sums of 3, 5 or 7 wishes (headline first), or the first dish (bill first)
GRPO="--preset toy --steps 14 --save-steps 14 --rewards data/toy/world.py:annotator:1 --max-completion-tokens $MAX_TOKENS"
for wishes in 3 5 7; do
  for first in headline bill; do
    task=$first-$wishes data=$RESULTS/data-$first-$wishes
    EVALUATE="$JUDGED --tasks $data/benchmark_tasks.jsonl"
    data_flags="--n-wishes $wishes"
    if [ $first = bill ]; then
      data_flags="$data_flags --bill-first"
    fi
    prepare "study-data-$task" makes "$data/held_out_prompts.jsonl" python -m data.toy.world --out "$data" $data_flags
    for way in think plain; do
      row "order/$task-sft-$way" needs "study-data-$task" sft --preset toy --epochs 1 --traces "$data/sft_traces.jsonl" --think-format $way
      row "order/$task-grpo-$way" from "$task-sft-$way" grpo $GRPO --prompts "$data/rl_prompts.jsonl" --think-format $way
    done
    if [ $wishes = 5 ]; then # 40 dots in place of the thinking: what do the mere tokens gain?
      traces=$data/dots_traces.jsonl
      prepare "study-dots-$task" needs "study-data-$task" makes "$traces" \
        sed -nE 's/("thinking": ")[^"]*/\1......................................../; w '"$traces" "$data/sft_traces.jsonl"
      row "order/$task-sft-dots" needs "study-dots-$task" sft --preset toy --epochs 1 --traces "$traces"
      row "order/$task-grpo-dots" from "$task-sft-dots" grpo $GRPO --prompts "$data/rl_prompts.jsonl"
    fi
  done
done

# --- 2. depth: the tasks of 5 wishes for networks of 1, 2 and 8 layers; `order` has those of 4
for layers in 1 2 8; do
  base=$RESULTS/base-$layers-layers
  prepare "study-base-$layers-layers" makes "$base/model.safetensors" python -m data.toy.models base --layers $layers --out "$base"
  for first in headline bill; do
    task=layers$layers-$first data=$RESULTS/data-$first-5
    EVALUATE="$JUDGED --tasks $data/benchmark_tasks.jsonl"
    for way in think plain; do
      row "depth/$task-sft-$way" needs "study-data-$first-5" needs "study-base-$layers-layers" sft --preset toy --epochs 1 --model "$base" \
        --traces "$data/sft_traces.jsonl" --think-format $way
      row "depth/$task-grpo-$way" from "$task-sft-$way" grpo $GRPO --prompts "$data/rl_prompts.jsonl" --think-format $way
    done
  done
done

# --- 3. hack: where a reward is hacked: what the reward model reads, how good it is, and the KL's weight; gold every 10 steps
LONG="--steps 100 --save-steps 10 --gold-prompts data/toy/held_out_prompts.jsonl"
EVALUATE="$JUDGED --tasks data/toy/benchmark_tasks.jsonl"
prepare study-data python -m data.toy.world
prepare study-medium-rm makes "$RESULTS/reward-medium/model.safetensors" python -m data.toy.models reward --base data/toy/base \
  --batch 12 --steps 150 --out "$RESULTS/reward-medium"
for beta in 0 0.04; do
  for reads in response think+response; do
    HACK="--preset toy $LONG --reward-on $reads --beta $beta"
    row "hack/shipped-$reads-beta$beta" from headline-5-sft-think needs study-data grpo $HACK
    row "hack/medium-$reads-beta$beta" from headline-5-sft-think needs study-data needs study-medium-rm grpo $HACK --reward-model "$RESULTS/reward-medium"
  done
done

# --- 4. audit: does eval_reward.py say before training what GRPO will find? A reward model as shipped, one that learned from edits, and
# one beside a language model that checks the sums before it marks them
AUDIT="python eval_reward.py --gold data/toy/world.py:gold --answers data/toy/sft_traces.jsonl --limit 150 --overwrite"
hard=$RESULTS/reward-hard
CHECKED="--rewards preference:1 data/toy/checker.py:check:0.5"
prepare study-edits needs study-data makes "$RESULTS/edits/pairs.jsonl" python eval_reward.py --reward-model data/toy/reward_model \
  --gold data/toy/world.py:gold --answers data/toy/preference_pairs.jsonl --limit 150 --overwrite --out "$RESULTS/edits"
prepare study-hard-rm needs study-edits makes "$hard/model/config.json" python train_reward.py --preset toy --model data/toy/reward_model \
  --reward-on think+response --learning-rate 3e-4 --epochs 1 --pairs "$RESULTS/edits/pairs.jsonl" --overwrite --out "$hard"
prepare study-audit-shipped needs study-data makes "$RESULTS/audit-shipped/summary.json" $AUDIT --reward-model data/toy/reward_model --out "$RESULTS/audit-shipped"
prepare study-audit-medium needs study-medium-rm makes "$RESULTS/audit-medium/summary.json" $AUDIT --reward-model "$RESULTS/reward-medium" --out "$RESULTS/audit-medium"
prepare study-audit-hard needs study-hard-rm makes "$RESULTS/audit-hard/summary.json" $AUDIT --reward-model "$hard/model" --out "$RESULTS/audit-hard"
prepare study-audit-checked needs study-data makes "$RESULTS/audit-checked/summary.json" $AUDIT --reward-model data/toy/reward_model $CHECKED --out "$RESULTS/audit-checked"
GUARDED="--preset toy $LONG --reward-on think+response"
row "audit/shipped-think" from headline-5-sft-think needs study-data needs study-audit-shipped needs study-audit-medium grpo $GUARDED
row "audit/hard-think" from headline-5-sft-think needs study-data needs study-hard-rm needs study-audit-hard grpo $GUARDED --reward-model "$hard/model"
row "audit/checked-think" from headline-5-sft-think needs study-data needs study-audit-checked grpo $GUARDED $CHECKED
row "audit/shipped-plain" from headline-5-sft-plain needs study-data grpo $GUARDED --think-format plain
row "audit/checked-plain" from headline-5-sft-plain needs study-data grpo $GUARDED --think-format plain $CHECKED

# --- 5. bridge: the party menu in the hands of a real language model: SmolLM2-135M
SMALL="--preset small --dtype $DTYPE"
EVALUATE="$JUDGED --tasks data/toy/benchmark_tasks.jsonl --rollout vllm --dtype $DTYPE"
prepare study-smollm2 makes data/smollm2 python -m data.prepare smollm2 --out data/smollm2
for way in think plain; do
  row "bridge/menu-sft-$way" needs study-smollm2 needs study-data sft $SMALL --epochs 1 --learning-rate 1e-3 \
    --traces data/toy/sft_traces.jsonl --think-format $way
  MENU="$SMALL --learning-rate 1e-3 --beta 0.01 --prompts data/toy/rl_prompts.jsonl --think-format $way"
  row "bridge/menu-grpo-utility-$way" from "menu-sft-$way" grpo $MENU --rewards data/toy/world.py:annotator:1
  # at a rate of 1e-3 the policy without thinking lost its endings by step 14
  row "bridge/menu-grpo-rm-$way" from "menu-sft-$way" grpo $MENU --learning-rate 3e-4 --reward-model data/toy/reward_model --reward-on response
done
