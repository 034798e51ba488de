"""Dense rewards by hand and against naive loops; where a step ends; PRIME's formula, its learning and its checkpoint."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, LlamaConfig
from transformers import LlamaForCausalLM, LlamaForTokenClassification, PreTrainedTokenizerFast, set_seed

from rlmt import checkpoint
from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import chat as templates
import rewards
import train_grpo
import utils
from rewards import dense
from data.toy import sums as toy_sums

# --- numbers


def test_token_advantages_by_hand():
    """Two rows of a group. Rewards to come: row 1 has 3 = 1 + 2 and then 2, row 2 has 1 and no second event, so at the first
    event the mean is 2 and at the second row 1 is alone. Root of the mean square of 1, -1, 0: sqrt(2/3)."""
    values = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]])
    plain = dense.token_advantages(values, values > 0, 2, scale=False)
    assert plain.tolist() == [[1, 1, 0, 0, 0], [-1, -1, -1, 0, 0]]
    torch.testing.assert_close(
        dense.token_advantages(values, values > 0, 2, scale=True), plain / (math.sqrt(2 / 3) + 1e-4)
    )
    assert not dense.token_advantages(values, torch.zeros(2, 5, dtype=torch.bool), 2, scale=True).any()


def test_token_advantages_is_the_naive_loop():
    torch.manual_seed(0)
    values, events = torch.randn(12, 9), torch.rand(12, 9) > 0.6
    events[3] = False
    got = dense.token_advantages(values, events, 4, scale=True)
    for start in range(0, 12, 4):
        rows = range(start, start + 4)
        places = {i: [t for t in range(9) if events[i, t]] for i in rows}
        to_come = {
            (i, k): sum(values[i, t].item() for t in places[i][k:])
            for i in rows
            for k in range(len(places[i]))
        }
        mean = lambda k, to_come=to_come: (lambda x: sum(x) / len(x))(
            [r for (_, j), r in to_come.items() if j == k]
        )
        centred = {key: r - mean(key[1]) for key, r in to_come.items()}
        scale = math.sqrt(sum(c * c for c in centred.values()) / len(centred)) + 1e-4
        for i in rows:
            for t in range(9):
                k = sum(p < t for p in places[i])
                expected = centred[i, k] / scale if k < len(places[i]) else 0.0
                assert got[i, t].item() == pytest.approx(expected, abs=1e-5)


# --- steps


def row(thinking: str, response: str, question: str = "How much?") -> SimpleNamespace:
    return SimpleNamespace(
        messages=[{"role": "user", "content": question}],
        thinking=thinking,
        response=response,
        text=f"<think>\n{thinking}\n</think>\n\n{response}",
        rewards={},
    )


def test_steps_are_paragraphs_and_the_response():
    found = row("One.\n\nOne.\n \nTwo\nlines.", "One.")
    assert [s for s, _ in dense.steps(found)] == ["One.", "One.", "Two\nlines.", "One."]
    for step, end in dense.steps(found):
        assert found.text[:end].endswith(step)
    assert [end for _, end in dense.steps(found)] == sorted(end for _, end in dense.steps(found))
    assert dense.steps(row("", "Hi")) == [("Hi", len(row("", "Hi").text))]


@pytest.mark.parametrize("text", ["<think> a <response> b </response>", "<think> a <response> b </think> c"])
def test_a_response_inside_a_thinking_is_no_step_of_its_own(text):
    """As in the Zero format, where the response has an opening tag of its own."""
    parts = utils.split_thinking(text, "zero_think")
    assert parts.status != "ok" and parts.response
    found = SimpleNamespace(text=text, thinking=parts.thinking, response=parts.response)
    assert dense.steps(found) == [(parts.thinking, text.index(parts.thinking) + len(parts.thinking))]


def test_steps_of_toy_sums():
    messages = [
        {"role": "user", "content": "The budget is 21 dollars for bacon, ham. What is left of the budget."}
    ]  # 4, 5
    judged = lambda thinking, response: [
        p for _, p in toy_sums.steps(messages, f"<think>\n{thinking}\n</think>\n\n{response}")
    ]
    assert judged("Budget 21. bacon 4 leaves 17. ham 5 leaves 12.", "You have 12 left.") == [1, 1, 1]
    assert judged("Budget 21. ham 5 leaves 16. bacon 4 leaves 11.", "You have 12 left.") == [
        1,
        0,
        0,
    ]  # right by chance
    assert judged("Budget 21. bacon 4 leaves 17. bacon 4 leaves 13.", "You have 13 left.") == [
        1,
        0,
        0,
    ]  # not asked twice
    assert judged("Budget 21. bacon 5 leaves 17. ham 5 leaves 12.", "You have 12 left.") == [
        0,
        0,
        0,
    ]  # a wrong price
    assert judged("", "You have 12 left.") == [1]
    text = "<think>\nbacon 4 leaves 17.\n</think>\n\nYou have 12 left."
    assert [text[:end].rsplit(" ", 1)[1] for end, _ in toy_sums.steps(messages, text)] == ["17.", "left."]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base")
    templates.prepare_tokenizer(tokenizer, "think")
    return tokenizer


def tiny(cls, tokenizer, **changes):
    set_seed(0)
    return cls(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **changes,
        )
    )


@pytest.fixture(scope="module")
def process_model(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("process")
    model = tiny(LlamaForTokenClassification, tokenizer, num_labels=2)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


ROWS = [
    row("Budget 21.\n\nbacon costs 4.\n\nham costs 5.", "You have 12 left."),
    row("", "No."),
    row("Good!", "Hello Hello Hello"),
    row("We have 12.", "You have 12 left.", "The budget is 12 dollars for bacon"),
]


def load_process_model(process_model, tokenizer, separator: str = "\n") -> dense.ProcessReward:
    options = {"model": process_model, "separator": separator}
    return dense.ProcessReward(options, 1.0, tokenizer, torch.device("cpu"))


# The row that trl documents at PRMTrainer.tokenize_row (trl 1.9.0; the version of requirements-test.txt has no PRMTrainer).
PRM_PIECES = {
    "Which": 23085,
    " number": 1372,
    " is": 374,
    " larger": 8131,
    ",": 11,
    " ": 220,
    "9": 24,
    ".": 13,
    "8": 23,
    " or": 476,
    "1": 16,
    "?": 30,
    " greater": 7046,
    " than": 1091,
    "H": 39,
    "ence": 763,
    " >": 861,
    "\n": 198,
    ".\n": 624,
}
PRM_PROMPT = [23085, 1372, 374, 8131, 11, 220, 24, 13, 23, 476, 220, 24, 13, 16, 16, 30]
PRM_STEP_1 = [16, 16, 374, 7046, 1091, 220, 23, 13, 198]
PRM_STEP_2 = [39, 763, 11, 220, 24, 13, 16, 16, 861, 220, 24, 13, 23, 13, 198]


def test_a_process_model_reads_the_documented_row_of_prm_trainer(process_model, tmp_path):
    """The ids are Qwen2.5's, in which a full stop and a line break are one token (624) unless they are tokenised apart."""
    pieces = Tokenizer(models.WordLevel(PRM_PIECES, unk_token="?"))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(r"\.\n| [A-Za-z>]+|Which|H|ence|\n|."), "isolated")
    shutil.copytree(process_model, tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=pieces).save_pretrained(tmp_path / "model")
    source = load_process_model(str(tmp_path / "model"), None)
    assert source.tokenizer("8.\n")["input_ids"] == [23, 624]

    example = row("11 is greater than 8.", "Hence, 9.11 > 9.8.", "Which number is larger, 9.8 or 9.11?")
    ids, ends = source.encode(example)
    assert ids == PRM_PROMPT + PRM_STEP_1 + PRM_STEP_2
    assert [place for _, place in ends] == [24, 39]  # the two separators
    source.tokenizer.bos_token = "H"
    assert source.encode(example)[0] == [39, *PRM_PROMPT, *PRM_STEP_1, *PRM_STEP_2]


def test_a_process_model_in_batches_is_one_by_one(process_model, tokenizer):
    """And it is what the model says at the separator after the step, in one forward without padding."""
    source = load_process_model(process_model, tokenizer)
    batched = source.probabilities(ROWS)
    model = AutoModelForTokenClassification.from_pretrained(process_model).eval()
    for found, example in zip(batched, ROWS, strict=True):
        assert [end for end, _ in found] == [end for _, end in dense.steps(example)]
        ids, places = source.encode(example)
        for (_, probability), (_, place) in zip(found, places, strict=True):
            assert tokenizer.decode(ids[place]) == "\n"
            logits = model(torch.tensor([ids[: place + 1]])).logits[0, -1]
            assert probability == pytest.approx(logits.softmax(-1)[1].item(), abs=1e-5)
    assert len({round(p, 4) for found in batched for _, p in found}) > 3


def test_a_process_model_that_is_none_is_refused(tokenizer, tmp_path, capsys):
    tiny(LlamaForTokenClassification, tokenizer, num_labels=3).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        dense.check_process_model(str(tmp_path))
    assert "with 3 labels" in capsys.readouterr().err


def test_what_a_row_earns_lies_on_the_last_token_of_its_steps(tokenizer, tmp_path):
    """The changes of the probability, which add up to the last one."""
    source = tmp_path / "judge.py"
    source.write_text(
        "def f(messages, text):\n    return [(text.index('17') + 2, 0.75), (len(text), 0.25)]\n"
    )
    text = "<think>\nbacon 4 leaves 17.\n</think>\n\nYou have 12 left."
    ids = templates.encode_completion(tokenizer, text)
    one = row("bacon 4 leaves 17.", "You have 12 left.")
    one.ids = ids
    source = load_process_model(f"{source}:f", tokenizer)
    values, events = source.token_rewards([one])
    assert one.rewards == {"process": 0.25}
    places = events[0].nonzero().flatten().tolist()
    assert [tokenizer.decode(ids[: p + 1]) for p in places] == ["<think>\nbacon 4 leaves 17", text]
    assert values[0, places].tolist() == [0.75, -0.5] and values.sum() == 0.25


# --- in the loops


def completion(i: int, ids: list[int], correct: float | None = None) -> rollout.Completion:
    generator = torch.Generator().manual_seed(i)
    return rollout.Completion(
        id=str(i),
        messages=[{"role": "user", "content": "Hello!"}],
        prompt_ids=torch.randint(5, 100, (4,), generator=generator).tolist(),
        ids=ids,
        text="",
        thinking="",
        response="",
        status="ok",
        cut_off=False,
        n_thinking_tokens=0,
        reward=1.0,
        correct=correct,
        advantages=[0.25] * len(ids),
    )


class Halves:
    """A source as those of dense.py: 1 on the second token, the share of tokens below 100 on the last."""

    name = "halves"
    weight = 0.5
    scaled = True

    def token_rewards(self, completions):
        values = torch.zeros(len(completions), max(len(c.ids) for c in completions))
        for n, one in enumerate(completions):
            values[n, 1] = 1.0
            values[n, len(one.ids) - 1] += sum(token < 100 for token in one.ids) / len(one.ids)
        return values, values != 0


def random_completions(n: int) -> list[rollout.Completion]:
    generator = torch.Generator().manual_seed(0)
    completions = []
    for i in range(n):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        ids = torch.randint(5, 200, (length,), generator=generator).tolist()
        completions.append(completion(i, ids, correct=None if i == 0 else float(i % 2)))
    return completions


def test_grpo_adds_token_advantages_to_those_of_the_outcome():
    completions = random_completions(8)
    completions[3].reward = math.nan  # nothing is learned from it
    values, events = Halves().token_rewards(completions)
    known = torch.tensor([[not math.isnan(one.reward)] for one in completions])
    expected = 0.25 + 0.5 * dense.token_advantages(values, events & known, 4, scale=True)
    dense.add_advantages(Halves(), completions, 4, scale=True)
    for one, row_ in zip(completions, expected, strict=True):
        assert one.advantages == pytest.approx(row_[: len(one.ids)].tolist())
    assert completions[3].advantages == [0.25] * len(completions[3].ids)


def prime(tokenizer, folder, resume_from=None, learning_rate=1e-2):
    """PRIME's model beside a policy that starts the same; its checkpoint folder, if it goes on from one."""
    args = train_grpo.Args(
        model=str(folder / "start"), gradient_checkpointing=False, temperature=1.0, micro_batch_tokens=40
    )
    if not (folder / "start").exists():
        tiny(LlamaForCausalLM, tokenizer, tie_word_embeddings=True).save_pretrained(folder / "start")
    accelerator = policy.start_accelerator()
    reference = policy.load_reference(args.model, 1.0, accelerator)
    options = {"beta": 0.5, "learning_rate": learning_rate}
    source = dense.ImplicitReward(args, 1.0, options, resume_from, reference, tokenizer, accelerator)
    if resume_from:
        checkpoint.load_optimizer(resume_from, "prime", source.learner.optimizer)
    return source


def test_prime_is_the_log_ratio_and_learns_what_is_right(tokenizer, tmp_path):
    source = prime(tokenizer, tmp_path)
    completions = random_completions(8)
    values, events = source.token_rewards(completions)
    assert values.abs().max() < 1e-5 and source.metrics["prime/loss"] == pytest.approx(math.log(2), abs=1e-5)
    for one, marks in zip(completions, events, strict=True):
        assert marks.sum() == len(one.ids)

    model = policy.unwrap(source.learner.model)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    now = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    now.load_state_dict(model.state_dict())
    values, _ = source.token_rewards(completions)
    for one, found in zip(completions, values, strict=True):
        ids = torch.tensor([one.prompt_ids + one.ids])
        n = len(one.prompt_ids)
        with torch.no_grad():
            ratios = [m(ids).logits[0, n - 1 : -1].log_softmax(-1) for m in (now, before)]
        picked = [r[torch.arange(len(one.ids)), one.ids] for r in ratios]
        torch.testing.assert_close(found[: len(one.ids)], 0.5 * (picked[0] - picked[1]), atol=1e-5, rtol=1e-3)
        assert one.rewards["prime"] == pytest.approx(found.sum().item(), abs=1e-5)
    for _ in range(60):
        source.token_rewards(completions)
    assert source.metrics["prime/accuracy"] == 1.0 and source.metrics["prime/loss"] < 0.1


def test_prime_ends_the_run_before_weights_that_are_not_finite(tokenizer, tmp_path):
    source = prime(tokenizer, tmp_path)
    weights = list(policy.unwrap(source.learner.model).parameters())
    before = [weight.clone() for weight in weights]
    weights[-1].register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match="--rewards prime: the loss of its model is 0.69"):
        source.token_rewards(random_completions(8))
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_prime_goes_on_from_a_checkpoint(tokenizer, tmp_path):
    """Three steps, and two steps and one after a resume: the same bits."""
    accelerator = policy.start_accelerator()
    completions = random_completions(8)
    whole = prime(tokenizer, tmp_path)
    for _ in range(2):
        whole.token_rewards(completions)
    checkpoint.save_weights(tmp_path / "saved" / "prime", whole.learner.model, accelerator, merge=False)
    checkpoint.save_optimizer(tmp_path / "saved", "prime", whole.learner.optimizer)
    whole.token_rewards(completions)
    resumed = prime(tokenizer, tmp_path, resume_from=tmp_path / "saved")
    resumed.token_rewards(completions)
    expected = policy.unwrap(whole.learner.model).state_dict()
    for name, weight in policy.unwrap(resumed.learner.model).state_dict().items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(
    "words, beta, message",
    [
        (["math:1", "process:1"], 0.1, "process.model=MODEL"),
        (["preference:1", "prime:1"], 0.1, "learns from what is right"),
        (["math:1", "prime:1"], 0.0, "compares with the reference model"),
        (["math:1", "prime:gate"], 0.1, "write prime:WEIGHT"),
    ],
)
def test_dense_rewards_that_cannot_be_had_are_said_first(words, beta, message, capsys):
    args = train_grpo.Args(rewards=tuple(words), beta=beta)
    prompts = [{"id": "p", "messages": [], "answer": "1"}]
    with pytest.raises(SystemExit) as e:
        rewards.check(args, prompts, policy.start_accelerator())
    assert e.value.code == 2 and message in capsys.readouterr().err
