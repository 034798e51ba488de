"""experiments/thinking_use.py against a naive loop, and what it leaves for tables."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from benchmarks.shipped import use_as_shipped
from data.toy import world as toy_world
from experiments import tables, thinking_use
from rlmt.chat import encode_prompt, load_tokenizer
from rlmt.data import write_jsonl
from utils import join_thinking


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_thinking_use_is_what_a_naive_loop_finds(opening, tmp_path):
    """The nats per token of a response after its own thinking, less those after another one, averaged by task.

    A template may open the thinking itself.
    """
    rng = random.Random(0)
    rows = []
    for task_id in ("a", "a", "b", "c"):
        order = toy_world.sample_order(random.Random(task_id))
        messages = [{"role": "user", "content": toy_world.write_prompt(order, random.Random(task_id))}]
        thinking, response = toy_world.write_answer(order, toy_world.TEACHER, rng)
        text = join_thinking(thinking, response, "zero_think")
        row = {
            "id": f"{task_id}-{len(rows)}",
            "temperature": 1.0,
            "messages": messages,
            "text": text,
            "thinking": thinking,
        }
        rows.append(row | {"status": "ok"})
    rows[3]["status"] = "no_close"
    folder = shutil.copytree(ROOT / "data/toy/base", tmp_path / "model")
    (folder / "think_format.json").write_text('{"think_format": "zero_think"}')
    tokenizer = load_tokenizer(str(folder))
    use_as_shipped(tokenizer, "zero_think", "auto", {})
    template = tokenizer.chat_template + "{% if add_generation_prompt %}" + opening + "{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(folder))
    use_as_shipped(tokenizer, "zero_think", "auto", {})
    assert tokenizer.opening == opening
    model = AutoModelForCausalLM.from_pretrained(folder)

    def nats(row: dict, other: dict) -> float:
        response = row["text"].partition("<response>")[2]
        thinking = other["text"].partition("<response>")[0].removeprefix(opening)
        start = tokenizer(thinking + "<response>")["input_ids"]
        ids = tokenizer(response)["input_ids"]
        whole = torch.tensor([encode_prompt(tokenizer, row["messages"]) + start + ids])
        logprobs = model(whole).logits[0, :-1].log_softmax(-1)
        return logprobs[torch.arange(-len(ids), 0), whole[0, -len(ids) :]].mean().item()

    own = [nats(row, row) for row in rows[:3]]
    lost = [own[0] - nats(rows[0], rows[2]), own[1] - nats(rows[1], rows[2]), own[2] - nats(rows[2], rows[0])]
    same = [own[0] - nats(rows[0], rows[1]), own[1] - nats(rows[1], rows[0])]
    numbers = thinking_use.measure(str(folder), "float32", rows, ["a", "a", "b", "c"])
    assert numbers["task_means"]["thinking_use"] == pytest.approx(
        {"a": np.mean(lost[:2]), "b": lost[2]}, abs=1e-4
    )
    assert numbers["thinking_use"] == pytest.approx((np.mean(lost[:2]) + lost[2]) / 2, abs=1e-4)
    assert numbers["task_means"]["thinking_use_same_task"] == pytest.approx({"a": np.mean(same)}, abs=1e-4)
    empty = [own[i] - nats(rows[i], {"text": "<think>  </think> <response>"}) for i in range(3)]
    assert numbers["thinking_use_empty"] == pytest.approx((np.mean(empty[:2]) + empty[2]) / 2, abs=1e-4)
    assert min(map(abs, lost + empty)) > 0.1

    run = tmp_path / "x-s0--gold"
    run.mkdir()
    write_jsonl(run / "generations.jsonl", rows)
    settings = {"model": str(folder), "dtype": "float32", "tasks": "t.jsonl", "samples": 2}
    config = {"args": settings | {"top_p": 1.0, "max_tokens": 128}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "summary.json").write_text('{"fingerprint": "f"}')
    thinking_use.main(thinking_use.Args((run,)))
    index = tables.read_index(tmp_path).set_index("metric")
    assert index.loc["thinking_use", "value"] == pytest.approx(numbers["thinking_use"], abs=1e-4)
    assert set(index["row"]) == {"x"} and set(index.index) == set(thinking_use.METRICS)
