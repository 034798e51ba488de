"""Tests rlmt/sampler.py and rlmt/vllm.py.

An engine and servers of vLLM run for real on the CPU, and transformers is compared with a plain argmax.
"""

import json
import math
import re
import subprocess
import sys
import time

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import tiny_config
from launch import started
from script_runs import BASE, ROOT, forget_vllm
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rlmt import chat, learner, model as policy, sampler as rollout, vllm as vllm_engine
from data.toy import world
from rlmt.sampler import Completion, Sampler, Sampling, ThinkingBudget, Transformers
from rlmt.run import RunArgs
from rlmt.saved import generate

TEXTS = [text for _, _, text, _ in world.orders_of("rl", 10, 0)]


@pytest.fixture(scope="module", autouse=True)
def leave_no_trace():
    yield
    forget_vllm()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = chat.load_tokenizer(BASE)
    chat.prepare_tokenizer(tokenizer, "think")
    return tokenizer


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [chat.encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in TEXTS]


@pytest.fixture(scope="module")
def untied(tokenizer, tmp_path_factory) -> str:
    """Saves a tiny random model with an untied head, whose generation config asks for other sampling."""
    folder = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, max_position_embeddings=512, initializer_range=0.2)
    model = LlamaForCausalLM(tiny_config(tokenizer, tie_word_embeddings=False, **sizes))
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, repetition_penalty=3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert json.loads((folder / "generation_config.json").read_text())["repetition_penalty"] == 3.0
    return str(folder)


@pytest.fixture(scope="module")
def engines(untied, tokenizer) -> dict[str, Sampler]:
    """Starts vLLM in this process for a tied and for an untied head; tests set `sampling` and `ends`.

    All engines of this module live to its end: one that goes takes the process group of the others with it.
    """
    found = {}
    for kind, folder in (("tied", BASE), ("untied", untied)):
        engine = vllm_engine.Engine(folder, max_length=256, memory=0.85, n_sequences=64)
        found[kind] = Sampler(engine, tokenizer, Sampling(0.7, 16))
    return found


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> subprocess.Popen:
    """Starts a server by the command of experiments/evaluate.sh, which prints its URL."""
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    words = f"-m rlmt.vllm --model {BASE} --rollout vllm --log {log} --top-p 0.95".split()
    pipe = subprocess.PIPE
    command = subprocess.Popen([sys.executable, *words], stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    yield command
    command.kill()


@pytest.fixture(scope="module")
def server(command, tokenizer) -> Sampler:
    url = command.stdout.readline().strip()
    assert url, command.stderr.read()
    return Sampler(vllm_engine.Server(BASE, url), tokenizer, Sampling(1.0, 12))


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(BASE)


@torch.no_grad()
def largest_gap(sampler: Sampler, trained: learner.Policy, prompts: list) -> float:
    """Returns how far sampler's and trainer's log-probability of a sampled token are apart at most, nats."""
    gaps = []
    for place, sample in sampler.sample(prompts):
        batch = learner.collate_ids([prompts[place]], [sample.ids], "cpu")
        expected, _ = trained(**batch)
        gaps.append((expected[0] - torch.tensor(sample.logprobs)).abs().max().item())
    return max(gaps)


# --- vLLM has the weights of the policy


@pytest.mark.parametrize("kind", ["tied", "untied", "LoRA"])
def test_vllm_samples_from_the_policy_after_sync(kind, engines, untied, prompts):
    torch.manual_seed(1)
    if kind == "LoRA":
        model = policy.load_trained(BASE, RunArgs(gradient_checkpointing=False, lora_r=4))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.1)
    else:
        model = AutoModelForCausalLM.from_pretrained(BASE if kind == "tied" else untied)
        for weight in model.parameters():
            weight.data.mul_(1 + 0.1 * torch.randn_like(weight))
    sampler = engines["untied" if kind == "untied" else "tied"]
    sampler.sampling = Sampling(temperature=0.7, max_tokens=24)
    trained = learner.Policy(model.eval(), 0.7)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    assert largest_gap(sampler, trained, prompts) > 0.05
    for _ in range(2):  # the second time over packed weights
        sampler.sync(trained)
        assert largest_gap(sampler, trained, prompts) < 1e-4
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


# --- where completions end


def argmax(model, prompt: list[int], n: int) -> list[int]:
    """Returns n greedy tokens, one forward of the whole row each."""
    ids = []
    while len(ids) < n:
        with torch.no_grad():
            ids.append(model(torch.tensor([prompt + ids])).logits[0, -1].argmax().item())
    return ids


def cut(ids: list[int], has_ended) -> tuple[list[int], bool]:
    """Returns the tokens up to where `has_ended(beginning of them)`, and whether they ended at all."""
    for n in range(1, len(ids) + 1):
        if has_ended(ids[:n]):
            return ids[:n], True
    return ids, False


def samplers(model, tokenizer, sampling: Sampling, ends: list[int], *by_vllm: Sampler) -> list[Sampler]:
    """Returns samplers by vLLM and by transformers, in batches of 1, 3 and 64, all with the weights of
    `model`.

    A server has those of the toy base model.
    """
    by_transformers = [
        Sampler(Transformers(tokenizer, batch_size=n), tokenizer, sampling) for n in (1, 3, 64)
    ]
    found = [*by_vllm, *by_transformers]
    for sampler in found:
        if not isinstance(sampler.backend, vllm_engine.Server):
            sampler.sync(learner.Policy(model, 1.0))
        sampler.sampling = sampling
        sampler.ends = ends
    return found


def test_greedy_completions_end_at_either_end_of_turn_or_at_the_stop_string(
    engines, server, base, tokenizer, prompts
):
    said = [argmax(base, prompt, 20) for prompt in prompts]
    written = [tokenizer.decode(ids) for ids in said]
    pairs = [tokenizer.decode(ids[n : n + 2]) for ids in said for n in range(3, 12)]
    stop = next(pair for pair in pairs if 2 <= sum(pair in text for text in written) <= 6)
    some = [token for token in range(len(tokenizer)) if 1 <= sum(token in ids for ids in said) <= 4]
    cases = [
        ("", some[:1], lambda ids: ids[-1] == some[0]),
        ("", some[:2], lambda ids: ids[-1] in some[:2]),
        (stop, [tokenizer.eos_token_id], lambda ids: stop in tokenizer.decode(ids)),
    ]
    for stop_string, ends, has_ended in cases:
        expected = {place: cut(ids, has_ended) for place, ids in enumerate(said)}
        assert {ended for _, ended in expected.values()} == {True, False}
        greedy = Sampling(temperature=0.0, max_tokens=20, stop=stop_string)
        for sampler in samplers(base, tokenizer, greedy, ends, engines["tied"], server):
            found = {place: (sample.ids, sample.finished) for place, sample in sampler.sample(prompts)}
            assert found == expected, (stop_string, ends, sampler.backend)


CLOSING = [5, 6, 7]


def budget_for_some(tokenizer, said: list[list[int]], end: int) -> ThinkingBudget:
    """Returns a budget that closes about half of the completions `said` after `end` tokens: those without a
    letter."""
    beginnings = [tokenizer.decode(ids[:end]) for ids in said]
    letters = sorted(set("".join(beginnings)))
    letter = min(letters, key=lambda letter: abs(2 * sum(letter in text for text in beginnings) - len(said)))
    return ThinkingBudget(end, opening_tag="", closed_pattern=re.escape(letter), closing=CLOSING)


def test_thinking_is_closed_at_its_budget(engines, server, base, tokenizer, prompts):
    """The completions that had closed it stay; the others go on behind the closing tokens, as an argmax
    says."""
    said = [argmax(base, prompt, 20) for prompt in prompts]
    budget = budget_for_some(tokenizer, said, end=8)
    expected = {}
    for place, ids in enumerate(said):
        if budget.closing_after(ids, tokenizer):
            head = ids[:8] + CLOSING
            ids = head + argmax(base, prompts[place] + head, 20 - len(head))
        expected[place] = ids
    n_closed = sum(expected[place] != ids for place, ids in enumerate(said))
    assert 0 < n_closed < len(said)

    greedy = Sampling(0.0, 20, budget=budget)
    never = [len(tokenizer) - 1]  # an end of turn that no completion has
    for sampler in samplers(base, tokenizer, greedy, never, engines["tied"], server):
        found = dict(sampler.sample(prompts))
        assert {place: sample.ids for place, sample in found.items()} == expected, sampler.backend
        for place, ids in enumerate(said):
            assert found[place].budget_used_up == (expected[place] != ids)


def test_samples_come_from_the_whole_distribution(engines, untied, tokenizer, prompts):
    """transformers by itself takes the 50 likeliest tokens, or follows the model's generation config."""
    model = AutoModelForCausalLM.from_pretrained(untied)
    with torch.no_grad():
        probabilities = model(torch.tensor([prompts[0]])).logits[0, -1].softmax(-1)
    likeliest = probabilities.topk(50).indices
    tail = 1 - probabilities[likeliest].sum().item()
    assert tail > 0.05
    torch.manual_seed(0)
    for sampler in samplers(model, tokenizer, Sampling(1.0, 1), [0], engines["untied"])[::3]:
        drawn = torch.tensor([sample.ids[0] for _, sample in sampler.sample([prompts[0]] * 400)])
        share = 1 - torch.isin(drawn, likeliest).double().mean().item()
        assert abs(share - tail) < 4 * (tail * (1 - tail) / 400) ** 0.5
    engines["untied"].sampling = Sampling(1.0, 4, top_p=1e-6)
    nucleus = [sample.ids for _, sample in engines["untied"].sample(prompts)]
    assert sorted(nucleus) == sorted(argmax(model, prompt, 4) for prompt in prompts)


# --- a server, or its owner, that is killed


def test_a_killed_server_ends_its_owner_in_one_line(command, server, base, tokenizer, prompts, tmp_path):
    greedy = Sampling(0.0, 20)
    url = server.backend.base_url
    samples = dict(generate(BASE, prompts, tokenizer, greedy, log=tmp_path / "log", url=url))
    for place, prompt in enumerate(prompts):
        expected, _ = cut(argmax(base, prompt, 20), lambda ids: ids[-1] in tokenizer.stop_ids)
        assert samples[place].ids == expected

    processes = psutil.Process(command.pid).children(recursive=True)
    [killed] = [process for process in processes if "api_server" in " ".join(process.cmdline())]
    killed.kill()
    assert command.wait(timeout=10) == 2
    error = command.stderr.read()
    assert error.count("error: ") == 1 and "exit code -9" in error and "Traceback" not in error, error
    assert not psutil.wait_procs(processes, timeout=10)[1]


OWNER = f"""
from pathlib import Path
from rlmt import chat
from rlmt.sampler import Sampling
from rlmt.saved import generate

tokenizer = chat.load_tokenizer("{BASE}")
next(generate("{BASE}", [[1]], tokenizer, Sampling(0.0, 20), log=Path("/dev/null"), rollout="vllm"))
"""


def test_a_killed_run_leaves_no_server(tmp_path):
    (tmp_path / "owner.py").write_text(OWNER)
    run = started([tmp_path / "owner.py"], tmp_path / "output")
    found = psutil.Process(run.pid).children
    while len(found(recursive=True)) < 2:  # the server, which is still starting, and its keeper
        assert run.is_alive()
        time.sleep(0.1)
    processes = found(recursive=True)
    run.kill()
    assert not psutil.wait_procs(processes, timeout=10)[1]


# --- the check that vLLM has the trainer's weights


def test_the_second_breach_in_a_row_ends_the_run(tokenizer, capsys):
    sampler = Sampler(Transformers(tokenizer), tokenizer, Sampling(1.0, 8))
    for step, gap in enumerate([0.0, 2e-3, 9e-4, 2e-3, 0.0, 2e-3], 1):
        sampler.check(step, {"sampling/logprob_gap": gap}, [])
    assert capsys.readouterr().out.count("a second time in a row ends the run") == 3
    with pytest.raises(RuntimeError, match="step 7: sampler and trainer disagree by 0.0020 nats"):
        sampler.check(7, {"sampling/logprob_gap": 2e-3}, [])
    sampler = Sampler(Transformers(tokenizer), tokenizer, Sampling(1.0, 8, top_p=0.9))
    for step in (1, 2):
        sampler.check(step, {"sampling/logprob_gap": -math.log(0.9)}, [])  # what top-p itself may do


# --- what is read from a completion, and logged of a step


def completion(n: int, n_thinking: int = 0, status: str = "ok", **rewards) -> Completion:
    cut_off = status == "truncated"
    return Completion("i", [], [1], [2] * n, "", "", "", status, cut_off, n_thinking, rewards=rewards)


def test_metrics_of_a_step_by_hand():
    completions = [
        completion(10, 4, preference=1.0, math=1.0),
        completion(20, 5, preference=-99.0, math=0.0, status="no_close"),
        completion(30, 0, preference=2.0, math=None, status="truncated"),
        completion(4, 1, preference=5.0, math=1.0),
    ]
    completions[0].reward = 1.0
    completions[3].reward = 5.0
    assert rollout.completion_metrics(completions) == pytest.approx(
        {
            "completions/mean_length": 16.0,
            "completions/min_length": 4,
            "completions/max_length": 30,
            "completions/clipped_ratio": 0.25,
            "completions/mean_terminated_length": 34 / 3,
            "completions/min_terminated_length": 4,
            "completions/max_terminated_length": 20,
            "think/format_ok": 0.5,
            "think/truncated": 0.25,
            "think/mean_tokens": 2.5,
            "think/response_tokens": 13.5,
            "reward/missing": 0.5,
            "reward/preference": 3.0,  # of those in good format
            "reward/math": 2 / 3,
        }
    )
