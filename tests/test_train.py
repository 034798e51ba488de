"""What all training scripts say before they start: presets, flags and input files."""

import json

GRPO = ["train_grpo.py", "--preset", "toy"]


def test_prompts_of_one_id_are_refused(here, tmp_path):
    rows = [{"id": 1, "messages": [{"role": "user", "content": text}]} for text in "ab"]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = here(*GRPO, "--model", "data/toy/base", "--prompts", path, "--dry-run")
    assert done.returncode == 2 and "have the same id" in done.stderr


def test_what_a_preset_sets_is_printed_and_the_rate_of_lora_is_doubted(here):
    """Not if the preset sets LoRA or the rate is given."""
    args = [*GRPO, "--model", "nowhere"]
    said = [
        here(*args).stdout,
        here(*args, "--lora-r", 4).stdout,
        here(*args, "--lora-r", 4, "--learning-rate", 1e-2).stdout,
    ]
    assert all("--preset toy sets prompts data/toy/rl_prompts.jsonl, " in text for text in said)
    assert ["LoRA wants about ten times as much" in text for text in said] == [False, True, False]


def test_a_url_without_a_key_is_accepted(here):
    done = here(*GRPO, "--model", "nowhere", "--gold", "judge:gpt-4o@http://localhost:8000/v1")
    assert "nowhere is neither a model folder" in done.stderr
