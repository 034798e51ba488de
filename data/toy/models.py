"""Trains the two small models that ship with the toy world: `base`, a base model, and `reward_model`.

    make toy-base                                  # both: about half an hour on two cores
    python -m data.toy.models base --out data/toy/base
    python -m data.toy.models reward --base data/toy/base --out data/toy/reward_model

The base model (Llama architecture, 0.9 million parameters, word-level tokenizer) reads unlabelled text about the toy
world: small talk about prices and kinds of dishes, orders repeated, small bills, and other people's replies double-
checked line by line; a few of the texts use the think and response tags, as text from the web does. It is never shown
an answer written as a chat model would.

The reward model stands for the one that a user downloads. It is that base model with a score on the last token, trained
by Bradley-Terry on noisy preferences between drafts of many writers and, beside it, on ratings of ten aspects with 5 %
of them wrong, as multi-aspect preference data have them. The rating heads are thrown away. `train_reward.py` trains
without ratings, and on far fewer pairs, so it gives the weak one of the ablation.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from data.toy import world as toy  # noqa: E402
import utils  # noqa: E402

SPECIALS = ["<|endoftext|>", "<|pad|>", "<unk>", "<|im_start|>", "<|im_end|>"]
PIECES = r" ?</?(?:think|response)>|<\|[a-z_]+\|>| ?[A-Za-z']+| ?\d+|\n+| ?[^\sA-Za-z\d]| "
ASPECTS = [name for name in toy.CHECKS if name != "brief"]


# --- text of the base model


def small_talk(rng: random.Random) -> str:
    """Half of the texts: an order repeated, prices and kinds asked, small bills, lists counted."""
    order, dishes = toy.sample_order(rng), rng.sample(list(toy.DISHES), rng.randint(2, 5))
    topic = rng.choice(["repeat", "repeat", "remind", "remind", "quiz", "bill", "bill", "compare", "count"])
    if topic == "repeat":
        facts = [
            f"The list is {', '.join(order.wishes)}.",
            f"The budget is {order.budget}.",
            f"No {order.avoid}.",
            f"Mention {order.word}.",
        ]
        rng.shuffle(facts)
        return f"User: {toy.write_prompt(order, rng)}\n\nAssistant: " + " ".join(facts)
    if topic == "remind":  # short, so that finding the one word is easy to learn
        clauses = [rng.choice(toy.REMINDERS).format(order.word), rng.choice([*toy.OPENINGS, *toy.GREETINGS])]
        rng.shuffle(clauses)
        answer = rng.choice([f"Mention {order.word}.", f"Remember the {order.word}!"])
        return f"User: {' '.join(filter(None, clauses))}\n\nAssistant: {answer}"
    if topic == "quiz":
        lines = [
            rng.choice(
                [
                    f"{d} costs {toy.DISHES[d][0]} dollars.",
                    f"{d} is {toy.DISHES[d][1]}.",
                    f"{d} {toy.DISHES[d][0]} {toy.DISHES[d][1]}.",
                ]
            )
            for d in dishes * 2
        ]
    elif topic == "compare":
        avoid, left = rng.choice(toy.KINDS), rng.randint(0, 12)
        lines = [f"Budget {left}, no {avoid}."]
        for d in dishes:
            price, kind = toy.DISHES[d]
            lines.append(
                f"{d} is {kind}."
                if kind == avoid
                else f"{d} {price} {'is too much' if price > left else 'fits'}."
            )
    elif topic == "bill":
        left = rng.choice(toy.BUDGETS)
        lines = [f"Budget {left}.", *small_bill(dishes, left)]
    else:
        lines = [f"{', '.join(dishes)}: {len(dishes)} dishes, {dishes[-1]} last."]
    return " ".join(lines)


def small_bill(dishes: list[str], left: int) -> list[str]:
    """Lines such as `ham 5 leaves 7.` and `ribs 7 is too much.`"""
    lines = []
    for d in dishes:
        price = toy.DISHES[d][0]
        if price > left:
            lines.append(f"{d} {price} is too much.")
        else:
            left -= price
            lines.append(f"{d} {price} leaves {left}.")
    return lines


def audit(order: toy.Order, reply: str) -> str:
    """Somebody double-checks a reply, wish by wish, then its bottom line: ` ok` or ` bad` after each point."""
    passed, mark = toy.check(order, reply), lambda good: "ok" if good else "bad"
    stated = {d: (int(p), int(r)) for d, p, r in toy.LINE.findall(toy.BILL.search(reply)[1])}
    left, lines, served = order.budget, [], list(stated)
    for d in order.wishes:
        price, kind = toy.DISHES[d]
        if d in stated:
            left -= price
            lines.append(
                f"{d} is {kind} {mark(kind != order.avoid)}, {price} {mark(stated[d][0] == price)}, leaves "
                f"{max(left, 0)} {mark(stated[d][1] == left)}."
            )
        elif kind == order.avoid:
            lines.append(f"no {d}: {kind} ok.")
        else:
            lines.append(f"no {d}: {price} is too much ok." if price > left else f"no {d}: {price} fits bad.")
    lines.append(
        f"{len(served)} dishes {mark(passed['count'])}, {max(left, 0)} left {mark(passed['spare'])}, "
        f"{served[-1]} last {mark(passed['last'])}, {order.word} {mark(passed['word'])}."
    )
    return " ".join(lines)


def base_text(rng: random.Random) -> str:
    """One text of the base model's corpus."""
    kind = rng.random()
    if kind < 0.45:
        return small_talk(rng)
    order, slips = (
        toy.sample_order(rng),
        {name: rng.uniform(0, 0.6) for name in toy.TEACHER},
    )  # writers of every kind
    prompt, (thinking, reply) = toy.write_prompt(order, rng), toy.write_answer(order, slips, rng)
    check = f"\n\nCheck it. {audit(order, reply)}" if toy.BILL.search(reply) else ""
    if kind < 0.8:
        return f"User: {prompt}\n\nSomebody wrote: {reply}{check}"
    answer = f"<think> {thinking} </think> <response> {reply} </response>"
    return f"User: {prompt}\n\nAssistant: {answer}{check if kind < 0.9 else ''}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer; a token carries the space before it, so that decoding gives the text back byte for byte."""
    rng = random.Random("vocabulary")
    texts = [base_text(rng) for _ in range(4000)] + list(utils.ZERO_INSTRUCTION.values())
    texts += [
        toy.write_prompt(toy.sample_order(rng), rng) for _ in range(1000)
    ]  # any word that a chat turn begins with
    texts += [f"{f} {' '.join(toy.DISHES)} {' '.join(toy.WORDS)}" for f in toy.FLATTERY] + [
        "user\nassistant\nsystem\n\n\n"
    ]
    texts += [space + tag for tag in utils.TAGS for space in ("", " ")]
    texts += [f" {n}" for n in range(61)]
    pre = pre_tokenizers.Split(Regex(PIECES), "isolated")
    words = sorted({piece for text in texts for piece, _ in pre.pre_tokenize_str(text)} - set(SPECIALS))
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIALS + words)}, unk_token="<unk>"))
    tok.pre_tokenizer, tok.decoder = pre, decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
        model_max_length=512,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


# --- optimisation


def optimizers(model: torch.nn.Module, steps: int, lr_matrix: float = 0.02, lr_rest: float = 2e-3):
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and heads; linear decay, 5 % warm-up."""
    named = list(model.named_parameters())
    inner = [p for n, p in named if p.ndim == 2 and ".layers." in n]
    rest = [p for n, p in named if not (p.ndim == 2 and ".layers." in n)]
    opts = [
        torch.optim.Muon(inner, lr=lr_matrix, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=lr_rest, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    decay = lambda i: min((i + 1) / (0.05 * steps), 1.0) * (1 - i / steps)
    return opts, [torch.optim.lr_scheduler.LambdaLR(o, decay) for o in opts]


def step(model, loss, opts, scheds) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for o, s in zip(opts, scheds):
        o.step()
        s.step()
    model.zero_grad(set_to_none=True)


@dataclass
class Args:
    what: tyro.conf.Positional[Literal["base", "reward"]]
    out: Path = Path("data/toy/base")
    base: Path = Path("data/toy/base")
    """Base model that the reward model starts from."""
    steps: int = 1100
    batch: int = 40
    """Rows of 256 tokens a step (base), or prompts a step (reward; four drafts each)."""
    seed: int = 0


def train_base(args: Args) -> None:
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    # Tied embeddings: from the usual 0.02 the ten words to be reminded of drift to one and the same vector, as they are
    # equally likely wherever a user says one, and no word can then be told from another. 0.1 keeps them apart.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    (opts, scheds), rng, stream, t0, mean = (
        optimizers(model, args.steps),
        random.Random(args.seed),
        [],
        time.time(),
        0,
    )
    for i in range(args.steps):
        while len(stream) < args.batch * 256:
            stream += [tokenizer.eos_token_id] + tokenizer(base_text(rng))["input_ids"]
        ids = torch.tensor(stream[: args.batch * 256]).view(args.batch, 256)
        stream = stream[args.batch * 256 :]
        loss = model(input_ids=ids, labels=ids).loss
        step(model, loss, opts, scheds)
        mean = 0.95 * mean + 0.05 * loss.item() if i else loss.item()
        if i % 25 == 0 or i == args.steps - 1:
            print(f"step {i}/{args.steps} loss {mean:.4f} {time.time() - t0:.0f} s", flush=True)
        if i % 200 == 199:
            model.save_pretrained(args.out)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def train_reward(args: Args) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.base, trust_remote_code=False)
    utils.prepare_tokenizer(tokenizer, "think")
    model = AutoModelForSequenceClassification.from_pretrained(
        args.base, num_labels=1, pad_token_id=tokenizer.pad_token_id, **utils.SAFE
    )
    both = torch.nn.ModuleDict(
        {"model": model, "ratings": torch.nn.Linear(model.config.hidden_size, len(ASPECTS))}
    )
    rng, t0, agree = random.Random(f"reward-{args.seed}"), time.time(), 0.5
    opts, scheds = optimizers(both, args.steps, lr_matrix=0.005, lr_rest=5e-4)
    for i in range(args.steps):
        rows, utilities, prefs, marks = [], [], [], []
        for _ in range(args.batch):
            order = toy.sample_order(rng)
            prompt, at, whole = toy.write_prompt(order, rng), len(rows), rng.random() < 0.5
            for thinking, reply in (toy.write_answer(order, toy.random_slips(rng), rng) for _ in range(4)):
                text = utils.join_thinking(
                    thinking, reply, "think" if whole else "plain"
                )  # it learns to read both views
                rows.append([{"role": "user", "content": prompt}, {"role": "assistant", "content": text}])
                utilities.append(toy.utility(order, reply))
                passed = toy.check(order, reply)
                marks.append([passed[name] != (rng.random() < 0.05) for name in ASPECTS])
            for a in range(at, at + 4):
                for b in range(a + 1, at + 4):
                    prefs.append((a, b) if toy.prefers_first(utilities[a], utilities[b], rng) else (b, a))
        ids = [tokenizer.apply_chat_template(r, return_dict=False) for r in rows]
        batch = tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
        hidden = model.model(**batch).last_hidden_state[
            torch.arange(len(ids)), batch["attention_mask"].sum(1) - 1
        ]
        score, (win, lose) = model.score(hidden)[:, 0], torch.tensor(prefs).T
        bradley_terry = -torch.nn.functional.logsigmoid(score[win] - score[lose]).mean()
        aspects = torch.nn.functional.binary_cross_entropy_with_logits(
            both["ratings"](hidden), torch.tensor(marks).float()
        )
        step(both, bradley_terry + 3 * aspects, opts, scheds)
        gap = (
            torch.tensor(utilities)[win] - torch.tensor(utilities)[lose]
        )  # what the annotator felt, before the noise
        right = (((score[win] - score[lose]) * gap)[gap != 0] > 0).float().mean().item()
        agree = 0.98 * agree + 0.02 * right
        if i % 25 == 0 or i == args.steps - 1:
            print(
                f"step {i}/{args.steps} agreement with the annotator's utility {agree:.3f} loss {bradley_terry.item():.3f} "
                f"ratings {aspects.item():.3f} {time.time() - t0:.0f} s",
                flush=True,
            )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.manual_seed(args.seed)
    {"base": train_base, "reward": train_reward}[args.what](args)
