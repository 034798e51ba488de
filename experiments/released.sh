# The checkpoints that the paper's authors publish, evaluated as they are: rows of tables 1 and 3, before anything is trained.
#
# Each is a folder of $CHECKPOINTS, or a link to one, with the name of our row: hf download NAME --local-dir checkpoints/ROW
# docs/paper.md says where the names are. reproduce.py leaves out the rows without a folder.
#
set -euo pipefail
# Settings. To copy single commands, paste the lines from here to the first block into your shell before.
# Each can be given: SEED=1 JUDGE_FLAGS="--budget 20 --price 2.5 10" bash experiments/released.sh
: "${SEED:=0}" "${RESULTS:=results}"
: "${CHECKPOINTS:=checkpoints}"
: "${JUDGE_FLAGS:=}" # how evaluate.sh asks the judges: --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${TEMPLATES:=}"   # folder with the judges' instructions; evaluate.sh says how it is laid out
export SEED RESULTS JUDGE_FLAGS TEMPLATES

evaluate() { # ROW FORMAT
  local max_tokens=8192
  if [ "$2" = plain ]; then # but not zero_plain, as with the authors
    max_tokens=4096
  fi
  MAX_TOKENS=$max_tokens THINK_FORMAT=$2 bash experiments/evaluate.sh "$CHECKPOINTS/$1" "$1-as-released-s$SEED"
}

# --- table 1

# row: table1/llama3.1-8b-sft-plain-as-released
evaluate llama3.1-8b-sft-plain plain

# row: table1/llama3.1-8b-sft-think-as-released
evaluate llama3.1-8b-sft-think think

# row: table1/llama3.1-8b-rlhf-as-released
evaluate llama3.1-8b-rlhf plain

# row: table1/llama3.1-8b-rlmt-as-released
evaluate llama3.1-8b-rlmt think

# row: table1/qwen2.5-7b-sft-plain-as-released
evaluate qwen2.5-7b-sft-plain plain

# row: table1/qwen2.5-7b-sft-think-as-released
evaluate qwen2.5-7b-sft-think think

# row: table1/qwen2.5-7b-rlhf-as-released
evaluate qwen2.5-7b-rlhf plain

# row: table1/qwen2.5-7b-rlmt-as-released
evaluate qwen2.5-7b-rlmt think

# row: table1/llama3.1-8b-instruct-sft-plain-as-released
evaluate llama3.1-8b-instruct-sft-plain plain

# row: table1/llama3.1-8b-instruct-sft-think-as-released
evaluate llama3.1-8b-instruct-sft-think think

# row: table1/llama3.1-8b-instruct-rlhf-as-released
evaluate llama3.1-8b-instruct-rlhf plain

# row: table1/llama3.1-8b-instruct-rlmt-as-released
evaluate llama3.1-8b-instruct-rlmt think

# row: table1/qwen2.5-7b-instruct-sft-plain-as-released
evaluate qwen2.5-7b-instruct-sft-plain plain

# row: table1/qwen2.5-7b-instruct-sft-think-as-released
evaluate qwen2.5-7b-instruct-sft-think think

# row: table1/qwen2.5-7b-instruct-rlhf-as-released
evaluate qwen2.5-7b-instruct-rlhf plain

# row: table1/qwen2.5-7b-instruct-rlmt-as-released
evaluate qwen2.5-7b-instruct-rlmt think

# row: table1/llama3.1-8b-rlhf-zero-as-released
evaluate llama3.1-8b-rlhf-zero zero_plain

# row: table1/llama3.1-8b-rlmt-zero-as-released
evaluate llama3.1-8b-rlmt-zero zero_think

# row: table1/qwen2.5-7b-rlhf-zero-as-released
evaluate qwen2.5-7b-rlhf-zero zero_plain

# row: table1/qwen2.5-7b-rlmt-zero-as-released
evaluate qwen2.5-7b-rlmt-zero zero_think

# --- table 3

# row: table3/llama3.1-8b-rlhf-dpo-as-released
evaluate llama3.1-8b-rlhf-dpo plain

# row: table3/llama3.1-8b-rlmt-dpo-as-released
evaluate llama3.1-8b-rlmt-dpo think

# row: table3/llama3.1-8b-rlhf-ppo-as-released
evaluate llama3.1-8b-rlhf-ppo plain

# row: table3/llama3.1-8b-rlmt-ppo-as-released
evaluate llama3.1-8b-rlmt-ppo think

# row: table3/qwen2.5-7b-rlhf-dpo-as-released
evaluate qwen2.5-7b-rlhf-dpo plain

# row: table3/qwen2.5-7b-rlmt-dpo-as-released
evaluate qwen2.5-7b-rlmt-dpo think

# row: table3/qwen2.5-7b-rlhf-ppo-as-released
evaluate qwen2.5-7b-rlhf-ppo plain

# row: table3/qwen2.5-7b-rlmt-ppo-as-released
evaluate qwen2.5-7b-rlmt-ppo think

# row: table3/llama3.1-8b-instruct-rlhf-dpo-as-released
evaluate llama3.1-8b-instruct-rlhf-dpo plain

# row: table3/llama3.1-8b-instruct-rlmt-dpo-as-released
evaluate llama3.1-8b-instruct-rlmt-dpo think

# row: table3/llama3.1-8b-instruct-rlhf-ppo-as-released
evaluate llama3.1-8b-instruct-rlhf-ppo plain

# row: table3/llama3.1-8b-instruct-rlmt-ppo-as-released
evaluate llama3.1-8b-instruct-rlmt-ppo think

# row: table3/qwen2.5-7b-instruct-rlhf-dpo-as-released
evaluate qwen2.5-7b-instruct-rlhf-dpo plain

# row: table3/qwen2.5-7b-instruct-rlmt-dpo-as-released
evaluate qwen2.5-7b-instruct-rlmt-dpo think

# row: table3/qwen2.5-7b-instruct-rlhf-ppo-as-released
evaluate qwen2.5-7b-instruct-rlhf-ppo plain

# row: table3/qwen2.5-7b-instruct-rlmt-ppo-as-released
evaluate qwen2.5-7b-instruct-rlmt-ppo think

# row: table3/llama3.1-8b-rlhf-zero-dpo-as-released
evaluate llama3.1-8b-rlhf-zero-dpo zero_plain

# row: table3/llama3.1-8b-rlmt-zero-dpo-as-released
evaluate llama3.1-8b-rlmt-zero-dpo zero_think

# row: table3/llama3.1-8b-rlhf-zero-ppo-as-released
evaluate llama3.1-8b-rlhf-zero-ppo zero_plain

# row: table3/llama3.1-8b-rlmt-zero-ppo-as-released
evaluate llama3.1-8b-rlmt-zero-ppo zero_think

# row: table3/qwen2.5-7b-rlhf-zero-dpo-as-released
evaluate qwen2.5-7b-rlhf-zero-dpo zero_plain

# row: table3/qwen2.5-7b-rlmt-zero-dpo-as-released
evaluate qwen2.5-7b-rlmt-zero-dpo zero_think

# row: table3/qwen2.5-7b-rlhf-zero-ppo-as-released
evaluate qwen2.5-7b-rlhf-zero-ppo zero_plain

# row: table3/qwen2.5-7b-rlmt-zero-ppo-as-released
evaluate qwen2.5-7b-rlmt-zero-ppo zero_think
