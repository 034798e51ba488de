"""The bench runs both sides of a comparison for real, at the size `tiny`, and both sides train on the same thing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from dev import bench, bench_work

ROOT = Path(__file__).resolve().parent.parent


def test_sft_against_trl(tmp_path):
    command = [sys.executable, "-m", "dev.bench", "sft", "--size", "tiny", "--pairs", "1", "--steps", "1"]
    done = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    written = json.loads((tmp_path / "sft__cpu.json").read_text())
    result = written["result"]
    assert result["same_tokens"]
    assert result["largest_difference"]["loss"] < 1e-5
    assert result["largest_difference"]["grad_norm"] < 1e-4
    ratio = result["peer / ours"]["median"]
    ours = result["ours"]["tokens_per_second"]["median"]
    peer = result["peer"]["tokens_per_second"]["median"]
    assert ratio == pytest.approx(ours / peer)
    assert f"**{ratio:.2f}** (once)" in (tmp_path / "table.md").read_text()


def test_lengths_of_completions_are_as_asked(tmp_path):
    """The end of turn is as likely after every token as the median and the prompt's rate word ask for."""
    size = bench_work.SIZES["tiny"] | {"median_tokens": 50}
    bench_work.make_models(tmp_path, size, seed=3)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    for rate_word in (0, 9, 15):
        prompt = [{"role": "user", "content": f"w{4 + rate_word} w77 w301 w40"}]
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text + " w99 w500 w321 w1000", return_tensors="pt").input_ids
        with torch.no_grad():
            last = model(ids).logits[0, -1].softmax(-1)[bench_work.END_ID].item()
        wanted = 0.6931 / 50 * 2.71828 ** bench_work.RATES[rate_word]
        assert last == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize(
    "wrong, field",
    [({"pairs": 0}, "--pairs"), ({"against": "../other"}, "--against")],
)
def test_refusals(tmp_path, capsys, wrong, field):
    with pytest.raises(SystemExit) as ended:
        bench.main(bench.Args(out=tmp_path, **wrong))
    assert ended.value.code == 2
    assert field in capsys.readouterr().err


def test_table_shows_each_result(tmp_path):
    numbers = {"median": 2.0, "min": 1.5, "max": 2.25}
    side = {"seconds_per_step": numbers, "tokens_per_second": numbers, "peak_gib": 1.0}
    result = {
        "ours": side,
        "peer": side,
        "peer / ours": numbers,
        "same_tokens": True,
        "largest_difference": {"loss": 1e-6},
    }
    about = {"case": "dpo", "device": "CPU", "commit": "0123456789", "peers": {"peer": "TRL"}}
    (tmp_path / "dpo__cpu.json").write_text(json.dumps(about | {"result": result}))
    (tmp_path / "sft__cpu.json").write_text(
        '{"case": "sft", "result": {}}'
    )  # of an earlier version: left out
    assert (
        "| dpo | CPU | TRL | 2 | 2 | **2.00** (1.50 to 2.25) | 2 | 1.00 / 1.00 | loss 1e-06 | 0123456 |"
        in bench.table(tmp_path)
    )
