"""data/toy/sums.py: its words are in the vocabulary, its answers are right, its splits are apart."""

import random

from transformers import AutoTokenizer

from data.toy import sums as toy_sums


def rows():
    return toy_sums.write_files(toy_sums.Args(n_traces=200, n_prompts=200, n_tasks=100))


def test_every_word_is_in_the_toy_vocabulary():
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base")
    for split in rows().values():
        for row in split:
            parts = [row["messages"][0]["content"], row.get("thinking", ""), row.get("response", "")]
            text = "\n".join(parts)
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text


def test_answers_by_hand():
    text = "Hi! The budget is 20 dollars for steak, cod. The question is how much is left."
    messages = [{"role": "user", "content": text}]
    assert toy_sums.read_prompt(text) == (20, ["steak", "cod"])
    left = 20 - toy_sums.DISHES["steak"][0] - toy_sums.DISHES["cod"][0]
    assert toy_sums.solve(20, ["steak", "cod"], 0.0, random.Random(0))[1] == f"You have {left} left."
    for response, right in [
        (f"You have {left} left.", 1),
        (f"steak 8, so {left}", 1),
        (f"{left} or {left + 1}", 0),
        ("", 0),
    ]:
        assert toy_sums.gold(messages, response) == right
    for row in rows()["sums_prompts"] + rows()["sums_tasks"]:
        assert toy_sums.gold(row["messages"], row["answer"]) == 1
        assert toy_sums.gold(row["messages"], "no number") == 0
