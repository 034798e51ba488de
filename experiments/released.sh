# The checkpoints that the paper's authors publish, evaluated as they are: rows of tables 1 and 3, before anything is trained.
#
# Each is a folder in checkpoints/, or a link to one, with the name of our row: hf download NAME --local-dir checkpoints/ROW
# rows.sh takes its format and limit of tokens from that name. docs/paper.md says where the NAMEs are. reproduce.py leaves out
# the rows without a folder.
set -euo pipefail
. experiments/rows.sh

for row in {llama3.1-8b,qwen2.5-7b,llama3.1-8b-instruct,qwen2.5-7b-instruct}-{sft-plain,sft-think,rlhf,rlmt} \
  {llama3.1-8b,qwen2.5-7b}-{rlhf-zero,rlmt-zero}; do
  row "table1/$row-as-released"
done
for row in {llama3.1-8b,qwen2.5-7b,llama3.1-8b-instruct,qwen2.5-7b-instruct}-{rlhf-dpo,rlmt-dpo,rlhf-ppo,rlmt-ppo} \
  {llama3.1-8b,qwen2.5-7b}-{rlhf-zero-dpo,rlmt-zero-dpo,rlhf-zero-ppo,rlmt-zero-ppo}; do
  row "table3/$row-as-released"
done
