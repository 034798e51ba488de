"""The benchmarks: table.py lists them; tested_model.py and judge.py ask model and judge; shared.py has what
all evaluations write; reward_model.py the proxy; scoring.py rows and means. Every other file is one
family."""
