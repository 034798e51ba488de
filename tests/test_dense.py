"""Dense rewards by hand and against naive loops; where a step ends; PRIME's formula, its learning and its checkpoint."""

import dataclasses
import json
import math

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, LlamaConfig
from transformers import LlamaForCausalLM, LlamaForTokenClassification, set_seed
from trl import GRPOConfig

from rewards import Scores, dense
import ppo
import rollout
import train_grpo
import train_ppo
import train_rlver
import utils
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


def row(thinking: str, response: str, question: str = "How much?") -> dict:
    return {
        "messages": [{"role": "user", "content": question}],
        "thinking": thinking,
        "response": response,
        "text": f"<think>\n{thinking}\n</think>\n\n{response}",
    }


def test_steps_are_paragraphs_and_the_response():
    found = row("One.\n\nOne.\n \nTwo\nlines.", "One.")
    assert [s for s, _ in dense.steps(found)] == ["One.", "One.", "Two\nlines.", "One."]
    for step, end in dense.steps(found):
        assert found["text"][:end].endswith(step)
    assert [end for _, end in dense.steps(found)] == sorted(end for _, end in dense.steps(found))
    assert dense.steps(row("", "Hi")) == [("Hi", len(row("", "Hi")["text"]))]


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
    utils.prepare_tokenizer(tokenizer, "think")
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


def test_a_process_model_in_batches_is_one_by_one(process_model, tokenizer):
    """And it is what the model says at the blank line after the step, in one forward without padding."""
    batched = dense.ProcessReward(process_model, "cpu", tokens_per_batch=100).probabilities(ROWS)
    model = AutoModelForTokenClassification.from_pretrained(process_model).eval()
    for found, example in zip(batched, ROWS, strict=True):
        steps = dense.steps(example)
        assert [end for end, _ in found] == [end for _, end in steps]
        for n, (_, probability) in enumerate(found):
            text = (
                example["messages"][0]["content"]
                + "\n\n"
                + "".join(step + "\n\n" for step, _ in steps[: n + 1])
            )
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            assert tokenizer.decode(ids[0, -1]) == "\n\n"
            assert probability == pytest.approx(model(ids).logits[0, -1].softmax(-1)[1].item(), abs=1e-5)
    assert len({round(p, 4) for found in batched for _, p in found}) > 3


def test_a_process_model_that_is_none_is_refused(tokenizer, tmp_path, capsys):
    tiny(LlamaForTokenClassification, tokenizer, num_labels=3).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        dense.ProcessReward.check(str(tmp_path))
    assert "with 3 labels" in capsys.readouterr().err


def test_what_a_row_earns_lies_on_the_last_token_of_its_steps(tokenizer, tmp_path):
    """The changes of the probability, which add up to the last one."""
    source = tmp_path / "judge.py"
    source.write_text(
        "def f(messages, text):\n    return [(text.index('17') + 2, 0.75), (len(text), 0.25)]\n"
    )
    text = "<think>\nbacon 4 leaves 17.\n</think>\n\nYou have 12 left."
    ids = utils.encode_completion(tokenizer, text)
    padded = torch.tensor([ids + [tokenizer.pad_token_id] * 3])
    output = {"completion_ids": padded, "completion_mask": torch.tensor([[1] * len(ids) + [0] * 3])}
    trainer = type("Trainer", (), {"processing_class": tokenizer})
    rows = [row("bacon 4 leaves 17.", "You have 12 left.")]
    values, events = dense.ProcessReward(f"{source}:f", "cpu", 100)(trainer, rows, output)
    places = events[0].nonzero().flatten().tolist()
    assert [tokenizer.decode(ids[: p + 1]) for p in places] == ["<think>\nbacon 4 leaves 17", text]
    assert values[0, places].tolist() == [0.75, -0.5] and values.sum() == 0.25


# --- in the trainers


def options(**changes):
    return (
        dict(
            max_steps=3,
            gradient_accumulation_steps=2,
            steps_per_generation=2,
            per_device_train_batch_size=4,
            max_completion_length=8,
            temperature=1.0,
            top_k=0,
            beta=0.01,
            use_bias_correction_kl=False,
            loss_type="dapo",
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="steps",
            save_steps=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            vllm_importance_sampling_correction=False,
            seed=3,
        )
        | changes
    )


def compose(rows, group_size):
    """Right is a completion with an even number of different words."""
    values = [float(len(set(r["response"].split())) % 2 == 0) for r in rows]
    return Scores(values, {"math": values}, {"math": values}, values, {})


def halves(trainer, rows, output):
    """A source as dense.py's are: 1 on the second token, the share of tokens below 100 on the last."""
    mask, values = output["completion_mask"], torch.zeros(output["completion_mask"].shape)
    last = mask.sum(1) - 1
    values[:, 1] = 1.0
    values[torch.arange(len(mask)), last] += ((output["completion_ids"] < 100) * mask).sum(1) / mask.sum(1)
    return values * mask, values != 0


halves.scaled = True


def trainer_of(cls, config, tokenizer, run, sources, **own):
    rows = [
        {"id": w, "prompt": [{"role": "user", "content": w}]}
        for w in ("Hello!", "Hi!", "Hey there!", "Good morning!")
    ]
    policy = tiny(LlamaForCausalLM, tokenizer, tie_word_embeddings=True)
    policy.save_pretrained(run / "start")
    policy.config._name_or_path = str(run / "start")
    return cls(
        model=policy,
        args=config(output_dir=str(run), **own.pop("options", options())),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_model=None,
        think_format="plain",
        on_bad_format="score",
        format_margin=1.0,
        run=run,
        allow_truncation=True,
        compose=compose,
        dense_rewards=sources,
        **own,
    )


class Watched(rollout.RolloutTrainer):
    def estimate_advantages(self, output):
        outcome, logged = output["advantages"].clone(), super().estimate_advantages(output)
        self.seen = getattr(self, "seen", []) + [(outcome, output, logged)]
        return logged


def test_grpo_adds_token_advantages_to_those_of_the_outcome(tokenizer, tmp_path):
    trainer = trainer_of(
        Watched,
        GRPOConfig,
        tokenizer,
        tmp_path,
        [("halves", 0.5, halves)],
        options=options(num_generations=4),
    )
    trainer.train()
    assert len(trainer.seen) == 3
    for outcome, output, logged in trainer.seen:
        mask = output["completion_mask"]
        values, events = halves(trainer, [], output)
        expected = outcome[:, None] + 0.5 * dense.token_advantages(values, events, 4, scale=True)
        torch.testing.assert_close(output["advantages"], expected * mask)
        torch.testing.assert_close(logged, (expected * mask).sum(1) / mask.sum(1))
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert (
        all(1 <= r["rewards"]["halves"] <= 2 for r in rows)
        and "reward/halves" in trainer.state.log_history[0]
    )


def test_ppo_adds_dense_rewards_to_the_tokens(tokenizer, tmp_path):
    class Seen(ppo.PPOTrainer):
        def estimate_advantages(self, output):
            logged = super().estimate_advantages(output)
            self.output, self.outcomes = output, [r["reward"] for r in self._rows]
            return logged

    critic = tiny(LlamaForTokenClassification, tokenizer, num_labels=1)
    trainer = trainer_of(
        Seen,
        ppo.PPOConfig,
        tokenizer,
        tmp_path,
        [("halves", 0.5, halves)],
        critic=critic,
        critic_learning_rate=1e-3,
        gamma=1.0,
        lam=1.0,
        value_clip=0.5,
        options=options(gradient_accumulation_steps=1, steps_per_generation=1),
    )
    trainer.train()
    mask = trainer.output["completion_mask"]
    rewards = 0.5 * halves(trainer, [], trainer.output)[0]
    rewards[torch.arange(len(mask)), mask.sum(1) - 1] += torch.tensor(trainer.outcomes)
    torch.testing.assert_close(
        trainer.output["returns"], rewards.flip(1).cumsum(1).flip(1) * mask
    )  # gamma = lambda = 1


def prime(tokenizer, run, steps=3, learning_rate=1e-3):
    source = dense.ImplicitReward(
        tiny(LlamaForCausalLM, tokenizer, tie_word_embeddings=True), 0.5, learning_rate
    )
    return trainer_of(
        Watched,
        GRPOConfig,
        tokenizer,
        run,
        [("prime", 1.0, source)],
        options=options(num_generations=4, max_steps=steps),
    ), source


def test_prime_is_the_log_ratio_and_learns_what_is_right(tokenizer, tmp_path):
    trainer, source = prime(tokenizer, tmp_path, steps=1)
    trainer.train()
    _, output, _ = trainer.seen[0]
    first = trainer.state.log_history[0]
    assert first["reward/prime"] == pytest.approx(0, abs=1e-6) and first["prime/loss"] == pytest.approx(
        math.log(2), abs=1e-5
    )
    trainer._rows = [r | {"rewards": {"math": 1.0 if n % 2 else 0.0}} for n, r in enumerate(trainer._rows)]
    trainer._rows[0]["rewards"]["math"] = None  # nobody knows: it teaches nothing
    before = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint-1"
    )  # the policy is not what is asked
    before.load_state_dict(trainer.accelerator.unwrap_model(source.model).state_dict())
    values, events = source(trainer, trainer._rows, output)
    assert torch.equal(events, output["completion_mask"].bool())
    for n in range(len(values)):
        prompt = output["prompt_ids"][n][output["prompt_mask"][n] == 1]
        ids = output["completion_ids"][n][output["completion_mask"][n] == 1]
        with torch.no_grad():
            logps = before(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = 0.5 * (logps[torch.arange(len(ids)), ids] - output["ref_per_token_logps"][n, : len(ids)])
        torch.testing.assert_close(values[n, : len(ids)], expected, atol=1e-5, rtol=1e-3)
    for _ in range(60):
        source(trainer, trainer._rows, output)
    accuracy = trainer._metrics["train"]["prime/accuracy"]
    assert accuracy[-1] == 1.0 > accuracy[0] and trainer._metrics["train"]["prime/loss"][-1] < 0.1


def test_prime_is_in_the_checkpoint(tokenizer, tmp_path):
    """Three steps, and two steps and one after a resume, which is in the second epoch: the same policy and the same model of
    PRIME."""
    whole, whole_source = prime(tokenizer, tmp_path)
    whole.train()
    resumed, source = prime(tokenizer, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for a, b in ((whole.model, resumed.model), (whole_source.model, source.model)):
        assert all(
            torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
        )
    start = tiny(LlamaForCausalLM, tokenizer, tie_word_embeddings=True).state_dict()
    assert not all(torch.equal(x, start[k]) for k, x in source.model.state_dict().items())


def test_each_reply_earns_the_change_that_it_made():
    """40 -> 60 -> 48 -> 68, and a talk that a reply in bad format ends at once: -0.4."""
    talk = lambda *emotions: (
        [{"role": "user"}]
        + [m for e in emotions for m in ({"role": "assistant"}, {"role": "user", "emotion-point": e})]
    )
    rows = [
        {"dialogue": talk(60, 48, 68), "reward": 0.68},
        {"dialogue": talk() + [{"role": "assistant"}], "reward": 0.0},
    ]
    own = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0]])
    output = {
        "completion_ids": own,
        "tool_mask": own,
        "completion_mask": torch.tensor([[1] * 8 + [0], [1] * 3 + [0] * 6]),
    }
    talks = type("Talks", (), {"turn_weight": 2.0, "setting": {"start": 40}, "_rows": rows})
    ((weight, _, values, events),) = train_rlver.Conversations.token_rewards(talks, output)
    assert events.nonzero().tolist() == [[0, 1], [0, 3], [0, 7], [1, 2]]
    assert weight == 2.0 and values[events].tolist() == pytest.approx([0.2, -0.12, 0.2, -0.4])


@pytest.mark.parametrize(
    "words, others, message",
    [
        (["math:1", "process:1"], {}, "process.model=MODEL"),
        (["preference:1", "prime:1"], {}, "learns from what is right"),
        (["math:1", "prime:1"], {"beta": 0.0}, "compares with the reference model"),
        (["math:1", "prime:gate"], {}, "takes a weight only"),
        (["process:1"], {}, "no outcome has a weight"),
    ],
)
def test_dense_rewards_that_cannot_be_had_are_said_first(words, others, message, capsys):
    with pytest.raises(SystemExit) as e:
        dense.load(train_grpo.Args(rewards=tuple(words), **others))
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_ppo_without_a_reference_has_no_prime(capsys):
    args = train_ppo.Args(rewards=("math:1", "prime:1"))
    assert dense.load(args) == []
    with pytest.raises(SystemExit):
        dense.load(dataclasses.replace(args, kl="none"))
    assert "compares with the reference model" in capsys.readouterr().err
