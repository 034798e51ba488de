"""bench.py: that its work, its clock and its memory formula are what they say, and that a case runs, for real and tiny."""

import json
import math
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from dev import bench

ROOT = Path(__file__).parents[1]
TINY = bench.SIZES["tiny"]


def test_completions_are_as_long_as_asked_for():
    """The end of turn has at every token the probability ln 2 / median, times e^rate of the prompt's rate word."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **bench.LLAMA | bench.CPU_POLICY, pad_token_id=0, eos_token_id=1, bos_token_id=None, head_dim=64
    )
    model = LlamaForCausalLM(config).eval()
    bench.give_lengths(model, 1, 70)
    for word in (0, 7, 15):
        ids = torch.cat([torch.full((1, 1), 4 + word), torch.randint(20, 8192, (1, 300))], 1)
        with torch.no_grad():
            p = model(ids).logits[0, 10:].softmax(-1)[:, 1]
        assert p.mean().item() == pytest.approx(math.exp(bench.RATES[word]) * math.log(2) / 70, rel=0.1)


def test_a_text_has_as_many_tokens_as_words(tmp_path):
    tokenizer = bench.make_tokenizer(tmp_path, 100)
    ids = [5, 99, 20, 1, 4]
    assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids


def test_the_clock_counts_every_moment_once():
    clock = bench.Clock()

    class Work:
        def inner(self):
            time.sleep(0.05)

        def outer(self):
            time.sleep(0.1)
            self.inner()

    work, start = Work(), time.perf_counter()
    clock.wrap(work, "inner", lambda: "inner")
    clock.wrap(work, "outer", "outer")
    work.outer()
    clock.mark()
    assert sum(clock.seconds.values()) == pytest.approx(time.perf_counter() - start, abs=0.02)
    assert clock.seconds["inner"] >= 0.05 and 0.1 <= clock.seconds["outer"] < clock.seconds["inner"] + 0.2


def test_live_bytes_by_hand():
    x = torch.ones(1000)
    with bench.LiveBytes() as live:
        y = x + 1  # 4,000 bytes
        z = (y * 2).view(10, 100)  # 4,000 more; a view is none
        z.add_(1)
        del y
        w = z.double()  # 8,000 beside the 4,000 of z
    assert (live.now, live.peak) == (12000, 12000)
    del w


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("rows, width", [(2, 160), (1, 400)])
def test_the_memory_formula_is_within_ten_per_cent_of_a_measured_micro_batch(rows, width, checkpointing):
    config = LlamaConfig(**bench.LLAMA | TINY["policy"])
    predicted = bench.update_gib(config, rows * width, rows * (width - 40), checkpointing)["peak"]
    assert predicted == pytest.approx(bench.measured_gib(config, rows, width, 40, checkpointing), rel=0.1)


def test_ratios_are_of_pairs_of_turns():
    turn = lambda seconds, loss: {
        "seconds": seconds,
        "peak_gib": 1.0,
        "gib": seconds / 2,
        "tokens": 10,
        "positions": 20,
        "useful": 10,
        "flops": 100,
        "phases": {"generate": 0.5, "update": seconds - 0.5},
        "loss": loss,
    }
    out = bench.compare({"ours": [turn(1.0, 0.5), turn(2.5, 0.5)], "peer": [turn(4.0, 0.5), turn(5.0, 0.75)]})
    assert out["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert (
        out["ours"]["flops_per_second"] == {"median": 125.0, "min": 50.0, "max": 200.0}
        and out["ours"]["growth_gib"] == 0.75
    )
    assert out["largest_difference_of_loss"] == 0.25 and out["ours"]["useful_share"] == 0.5


def test_sft_runs_on_both_sides_with_equal_loss(tmp_path):
    bench.main(bench.Args(cases=("sft",), repeats=1, out=tmp_path, size="tiny"))
    saved = json.loads((tmp_path / f"sft__{bench.DEVICE}.json").read_text())
    result = saved["result"]
    assert result["largest_difference_of_loss"] < 1e-4 and result["largest_difference_of_grad_norm"] < 1e-4
    assert result["ours"]["useful_share"] == 1.0 > result["peer"]["useful_share"] > 0.2
    assert (
        result["ratio"]["median"] > 0
        and saved["versions"]["trl"]
        and "| sft |" in (tmp_path / "table.md").read_text()
    )


def test_no_client_passes_the_limit(tmp_path):
    out = bench.judge(tmp_path, {"calls": 64}, bench.Args(repeats=1))
    assert all(0 < r["share_of_limit"]["max"] <= 1 for r in out.values()) and len(out) == 3


def test_the_readme_has_the_measured_table():
    table = bench.markdown(ROOT / "results" / "bench")
    assert "| grpo |" in table and table in (ROOT / "README.md").read_text()


def test_operations_of_a_forward_and_a_backward_by_hand():
    """Two tokens of three: 2 a weight and token; three times that with a backward, if all weights are trained; the embedding
    is looked up, not multiplied. torch's own counter agrees but for attention's products."""
    config = LlamaConfig(**bench.LLAMA | TINY["policy"])
    model, counts = LlamaForCausalLM(config), Counter()
    bench.count_tokens(model, counts)
    n = model.num_parameters() - config.vocab_size * config.hidden_size
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1]]))
    assert counts["flops"] == 2 * 2 * n
    counts.clear()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    assert counts["flops"] == 3 * 2 * 3 * n == pytest.approx(counter.get_total_flops(), rel=0.02)
