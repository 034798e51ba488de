"""The benchmarks: table.py lists them, shared.py asks models and judges, every other file is one family."""
