# Table 2: one model of table 1 beside models of others.
#
# It has no command of its own: everything is in table1.sh.

# row: table2/llama3.1-8b-instruct-rlmt
# needs: table1/llama3.1-8b-instruct-rlmt
