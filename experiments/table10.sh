# Table 10: models of table 1 beside models of others.
#
# It has no command of its own: everything is in table1.sh.

# row: table10/llama3.1-8b-rlmt-zero
# needs: table1/llama3.1-8b-rlmt-zero

# row: table10/qwen2.5-7b-rlmt-zero
# needs: table1/qwen2.5-7b-rlmt-zero

# row: table10/llama3.1-8b-instruct-rlmt
# needs: table1/llama3.1-8b-instruct-rlmt

# row: table10/qwen2.5-7b-instruct-rlmt
# needs: table1/qwen2.5-7b-instruct-rlmt
