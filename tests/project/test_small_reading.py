"""What experiments/small_reading.py reads in runs that are made up, counted by hand."""

from pathlib import Path

from experiments import small_reading
from rlmt import data as rlmt_data


def completion(step: int, name: str, prompt: str, thinking: str, response: str, gold: float = 0.0) -> dict:
    return {
        "step": step,
        "id": name,
        "messages": [{"role": "user", "content": prompt}],
        "thinking": thinking,
        "response": response,
        "status": "ok",
        "rewards": {"preference": -gold, "gold": gold},
    }


def write(results: Path, run: str, rows: list[dict], file: str = "held_out_completions.jsonl") -> None:
    folder = results / "runs" / run
    folder.mkdir(parents=True)
    rlmt_data.write_jsonl(folder / file, rows)


def read(results: Path, capsys) -> str:
    """Returns what the script prints."""
    small_reading.main(small_reading.Args(results=results))
    return capsys.readouterr().out


def test_changes_are_those_of_prompts_that_have_both_steps_in_good_format(tmp_path, capsys):
    """By hand: gold rises by 0.8 + 0.23 * words, residuals 0.2, -0.1, -0.4, 0.3; the proxy falls by as much."""
    rises = {"a": (0, 1.0), "b": (10, 3.0), "c": (20, 5.0), "d": (30, 8.0)}
    rows = []
    for name, (words, gold) in rises.items():
        rows.append(completion(0, name, "?", "", "word, " * 7, gold=2.0))
        rows.insert(0, completion(30, name, "?", "", "word, " * (7 + words), gold=2.0 + gold))
    cut_off = completion(30, "e", "?", "", "word " * 99, gold=99.0) | {"status": "truncated"}
    rows += [
        completion(0, "e", "?", "", "word"),
        cut_off,
        completion(10, "d", "?", "", "word " * 36, gold=4.5),
    ]
    write(tmp_path, "grpo-plain-s1", rows)

    text = read(tmp_path, capsys)
    rewards = "-4.25 ± 1.49 | -0.80 ± 0.32 | +4.25 ± 1.49 | +0.80 ± 0.32"
    assert f"| no thinking | 1 | 0 to 30 | 4 | +15 ± 6 | {rewards} |" in text
    assert "| no thinking | 1 | 10 to 30 | 1 | +1 ± – | -5.50 ± – | – | +5.50 ± – | – |" in text
    assert "| thinking |" not in text and "| no thinking | 0 |" not in text


def test_readings_are_shares_of_different_words_of_four_latin_letters(tmp_path, capsys):
    plan = (
        "Asked: Name three DOGS and fish?\nForm: one sentence, about 10 words.\nPoints: Dogs bark; Fish swim."
    )
    rows = [
        # 2 of name, three, dogs, fish; 2 of name, three, purple, cats, today; all of purple, three
        completion(
            0, "a", "Name three purple cats, PURPLE Cats today.", plan, "Purple, purple sky and three"
        ),
        # 0 of tell, joke; 0 of boil, eggs; 0 of never
        completion(0, "b", "Boil two eggs", "Asked: Tell a joke.\nThe Points: none", "Never!"),
        # no words to look for
        completion(0, "c", "Кто ты?", "Asked: Who?", "ありがとう"),
        completion(0, "d", "Boil eggs", plan, "Boil eggs") | {"status": "truncated"},
        completion(30, "b", "Boil two eggs", "Asked: Boil eggs.", "Boil water"),
    ]
    write(tmp_path, "grpo-think-s0", rows)

    text = read(tmp_path, capsys)
    assert "| completions in good format | 0 | 3 | – | – | 1 |" in text
    assert '| thinking has a line "Points:" | 0 | 0.33 | – | – | 0.00 |' in text
    assert '| words of the line "Asked:" that stand in the prompt | 0 | 0.25 | – | – | 1.00 |' in text
    assert "| plans that share no word with the prompt | 0 | 1 | – | – | 0 |" in text
    assert "| plans that take all words from it | 0 | 0 | – | – | 1 |" in text
    assert "| responses that take all words from it | 0 | 1 | – | – | 0 |" in text
    assert "| words of the prompt that stand in the response, thinking | 0 | 0.20 | – | – | 0.50 |" in text
    assert "response, no thinking" not in text


def test_announced_lengths_are_compared_with_written_ones(tmp_path, capsys):
    """By hand: 10, 20, 30 are announced and 2, 4, 3 written: (10 * 1 + 0 + 0) / sqrt(200 * 2)."""
    rows = []
    for name, announced, words in (("a", "10", 2), ("b", "20", 4), ("c", "30", 3), ("d", "many", 50)):
        plan = f"Asked: Why?\nForm: one sentence, about {announced} words."
        rows.append(completion(20, name, "Why?", plan, "no " * words))
    write(tmp_path, "grpo-think-s1", rows)
    text = read(tmp_path, capsys)
    assert '| plans with "about N words" | 1 | – | – | 3 | – |' in text
    assert "| correlation of N with the words of the response | 1 | – | – | 0.50 | – |" in text


def test_rlvr_has_means_of_six_steps(tmp_path, capsys, exits):
    steps = []
    for step in range(1, 8):
        line = {"step": step, "reward/instructions": step / 10, "frac_reward_zero_std": float(step == 2)}
        steps.append(
            line | {"think/response_tokens": 10 * step, "think/truncated": 0.5, "kl": 0.02, "loss": 9.0}
        )
    write(tmp_path, "rlvr-plain", steps, "metrics.jsonl")
    args = small_reading.Args(results=tmp_path)
    assert "has no run of GRPO" in exits(small_reading.main, args)

    write(tmp_path, "grpo-think-s0", [completion(0, "a", "?", "", "word")])
    text = read(tmp_path, capsys)
    assert "| 1 to 6 | 0.35 | 0.17 | 35 | 0.50 | 0.02 |\n| 7 to 7 | 0.70 | 0.00 | 70 | 0.50 | 0.02 |" in text
