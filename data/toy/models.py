"""Trains the two small models that ship with the toy world: `base`, a base model, and `reward_model`.

    make toy-base                                  # both: about half an hour on two cores
    python -m data.toy.models base --out data/toy/base
    python -m data.toy.models reward --base data/toy/base --out data/toy/reward_model

The base model (Llama architecture, 0.9 million parameters, word-level tokenizer) reads unlabelled text about
the toy world: small talk about prices and kinds of dishes, orders repeated, small bills, and replies by other
people that somebody checks line by line. A few of the texts use the think and response tags, as text from the
web does. None is an answer in the format of a chat model.

The reward model plays the part of one that a user downloads. It is the base model with a score on the last
token, trained by Bradley-Terry on noisy preferences between drafts of many writers. It also learns to rate
ten aspects, with 5 % of the ratings wrong, as preference data with several aspects have them; the rating
heads are thrown away. `train_reward.py` trains without ratings and on far fewer pairs, which gives the weak
reward model of the ablation.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import prepare_tokenizer
import torch
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from utils import SAFE, TAGS, THINK_FORMATS, join_thinking
from data.toy import world as toy
from data.toy.files import user_turn

SPECIALS = ["<|endoftext|>", "<|pad|>", "<unk>", "<|im_start|>", "<|im_end|>"]
TAG_PIECES = "|".join(f" ?{re.escape(tag)}" for tag in TAGS)
PIECES = TAG_PIECES + r"|<\|[a-z_]+\|>| ?[A-Za-z']+| ?\d+|\n+| ?[^\sA-Za-z\d]| "
ROW_TOKENS = 256  # length of a row in the base model's batches
DRAFTS = 4  # drafts of a prompt in the reward model's batches
RATING_NOISE = 0.05  # share of ratings that are wrong
RATING_WEIGHT = 3  # of the ratings' loss, against 1 for Bradley-Terry


@dataclass
class Args:
    what: tyro.conf.Positional[Literal["base", "reward"]]
    """Which of the two models to train."""
    out: Path = Path("data/toy/base")
    """Folder for the model."""
    base: Path = Path("data/toy/base")
    """Base model that the reward model starts from."""
    steps: int = 1100
    """Optimizer steps."""
    batch: int = 40
    """Rows of 256 tokens a step (base), or prompts a step (reward; four drafts each)."""
    layers: int = 4
    """Layers of the base model: 1 has 0.25 million parameters, 2 have 0.5, 4 have 0.9, 8 have 1.7."""
    seed: int = 0
    """Random seed of texts, drafts and new weights."""


# --- 1. text of the base model


def base_text(rng: random.Random) -> str:
    """Writes one text for the base model: small talk, somebody's reply, or an order with an answer."""
    kind = rng.random()
    if kind < 0.45:
        return small_talk(rng)
    order = toy.sample_order(rng)
    slips = {name: rng.uniform(0, 0.6) for name in toy.TEACHER}  # writers of every kind
    prompt = toy.write_prompt(order, rng)
    thinking, reply = toy.write_answer(order, slips, rng)
    check = ""
    if toy.BILL.search(reply):
        check = f"\n\nCheck it. {audit(order, reply)}"
    if kind < 0.8:
        return f"User: {prompt}\n\nSomebody wrote: {reply}{check}"
    if kind >= 0.9:
        check = ""
    return f"User: {prompt}\n\nAssistant: <think> {thinking} </think> <response> {reply} </response>{check}"


def small_talk(rng: random.Random) -> str:
    """Writes an order repeated, a reminder, prices and kinds of dishes, a small bill, or a count."""
    order = toy.sample_order(rng)
    dishes = rng.sample(list(toy.DISHES), rng.randint(2, 5))
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
        lines = [dish_fact(dish, rng) for dish in dishes * 2]
    elif topic == "compare":
        avoid = rng.choice(toy.KINDS)
        left = rng.randint(0, 12)
        lines = [f"Budget {left}, no {avoid}.", *[verdict(dish, avoid, left) for dish in dishes]]
    elif topic == "bill":
        left = rng.choice(toy.BUDGETS)
        order = toy.Order(dishes, "", left, "")
        _, notes = toy.write_bill(order, toy.NO_SLIPS, rng)  # without slips it draws nothing
        lines = [f"Budget {left}.", *notes]
    else:
        lines = [f"{', '.join(dishes)}: {len(dishes)} dishes, {dishes[-1]} last."]
    return " ".join(lines)


def dish_fact(dish: str, rng: random.Random) -> str:
    """States the price, the kind or both of a dish."""
    price, kind = toy.DISHES[dish]
    return rng.choice([f"{dish} costs {price} dollars.", f"{dish} is {kind}.", f"{dish} {price} {kind}."])


def verdict(dish: str, avoid: str, left: int) -> str:
    """States whether a dish is allowed and affordable with `left` dollars."""
    price, kind = toy.DISHES[dish]
    if kind == avoid:
        return f"{dish} is {kind}."
    if price > left:
        return f"{dish} {price} is too much."
    return f"{dish} {price} fits."


def audit(order: toy.Order, reply: str) -> str:
    """Checks a reply wish by wish, then its bottom line, with ` ok` or ` bad` after each point."""
    passed = toy.check(order, reply)
    stated = {dish: (price, left) for dish, price, left in toy.read_bill(reply)}
    left = order.budget
    lines = []
    for dish in order.wishes:
        price, kind = toy.DISHES[dish]
        if dish in stated:
            left -= price
            stated_price, stated_left = stated[dish]
            lines.append(
                f"{dish} is {kind} {mark(kind != order.avoid)}, {price} {mark(stated_price == price)}, "
                f"leaves {max(left, 0)} {mark(stated_left == left)}."
            )
        elif kind == order.avoid:
            lines.append(f"no {dish}: {kind} ok.")
        elif price > left:
            lines.append(f"no {dish}: {price} is too much ok.")
        else:
            lines.append(f"no {dish}: {price} fits bad.")
    served = list(stated)
    lines.append(
        f"{len(served)} dishes {mark(passed['count'])}, {max(left, 0)} left {mark(passed['spare'])}, "
        f"{served[-1]} last {mark(passed['last'])}, {order.word} {mark(passed['word'])}."
    )
    return " ".join(lines)


def mark(good: bool) -> str:
    return "ok" if good else "bad"


# --- 2. tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a word-level tokenizer. A token includes the space before it, so decoding is exact."""
    rng = random.Random("vocabulary")
    texts = [base_text(rng) for _ in range(4000)]
    texts += [think_format.instruction for think_format in THINK_FORMATS.values()]
    for _ in range(1000):  # any word that a chat turn begins with
        texts.append(toy.write_prompt(toy.sample_order(rng), rng))
    texts += [f"{phrase} {' '.join(toy.DISHES)} {' '.join(toy.WORDS)}" for phrase in toy.FLATTERY]
    texts.append("user\nassistant\nsystem\n\n\n")
    texts += [f"{tag} {tag}" for tag in TAGS]
    texts += [f" {number}" for number in range(61)]

    splitter = pre_tokenizers.Split(Regex(PIECES), "isolated")
    words = words_of(texts, splitter)
    vocabulary = SPECIALS + sorted(words - set(SPECIALS))
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
        model_max_length=512,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def words_of(texts: list[str], splitter: pre_tokenizers.PreTokenizer) -> set[str]:
    """Returns the words that a tokenizer splits texts into."""
    words = set()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(text))
    return words


# --- 3. training


def train(
    model: torch.nn.Module, losses: Iterator[torch.Tensor], steps: int, lr_matrix: float, lr_rest: float
) -> None:
    """Takes a step on each of the first `steps` losses of a model.

    Muon for matrices inside the layers, AdamW for the rest; 5 % warm-up, then linear decay.
    """
    inner, rest = [], []
    for name, parameter in model.named_parameters():
        is_inner_matrix = parameter.ndim == 2 and ".layers." in name
        (inner if is_inner_matrix else rest).append(parameter)
    optimizers = [
        torch.optim.Muon(inner, lr=lr_matrix, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=lr_rest, weight_decay=0.0, betas=(0.9, 0.95)),
    ]

    def rate(step: int) -> float:
        return min((step + 1) / (0.05 * steps), 1.0) * (1 - step / steps)

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    for step, loss in zip(range(steps), losses):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
        if step % 25 == 0:
            print(f"step {step}/{steps} loss {loss:.4f}", flush=True)


def train_base(out: Path, steps: int, batch: int, layers: int, seed: int) -> None:
    """Trains the base model on rows of 256 tokens, cut out of one stream of texts."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    # With tied embeddings of the usual size (0.02), the ten words to be reminded of drift to one and the same
    # vector, since each is equally likely wherever a user says one. Then no word can be told from another.
    # 0.1 keeps them apart.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)

    def losses() -> Iterator[torch.Tensor]:
        rng = random.Random(seed)
        batch_tokens = batch * ROW_TOKENS
        stream = []  # token ids not yet trained on
        while True:
            while len(stream) < batch_tokens:
                stream.append(tokenizer.eos_token_id)
                stream += tokenizer(base_text(rng))["input_ids"]
            ids = torch.tensor(stream[:batch_tokens]).view(batch, ROW_TOKENS)
            stream = stream[batch_tokens:]
            yield model(input_ids=ids, labels=ids).loss

    train(model, losses(), steps, lr_matrix=0.02, lr_rest=2e-3)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def extend_base(base: Path, out: Path, texts: list[str]) -> None:
    """Writes a copy of a base model whose vocabulary also has the words of `texts`.

    Their embeddings are random, with the standard deviation of the others. Input and output embeddings are
    tied, so rows of another size would change how likely the new words are before any training.
    """
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(base, **SAFE)
    tokenizer.save_pretrained(out)
    saved = json.loads((out / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    n_old = len(vocabulary)
    # twice, as a word may be split differently at the start of a line
    doubled = [f"{text}\n{text}" for text in texts]
    for word in sorted(words_of(doubled, tokenizer.backend_tokenizer.pre_tokenizer)):
        vocabulary.setdefault(word, len(vocabulary))
    (out / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False))

    torch.manual_seed(0)
    embeddings = model.resize_token_embeddings(len(vocabulary), mean_resizing=False).weight.data
    torch.nn.init.normal_(embeddings[n_old:], std=embeddings[:n_old].std().item())
    model.save_pretrained(out)
    print(f"{out}: {len(vocabulary) - n_old} new words")


def draft_batch(n_prompts: int, rng: random.Random) -> tuple[list, list, list]:
    """Writes drafts (B = n_prompts * DRAFTS) for new prompts.

    Half of the prompts show the thinking, so both views are learned.

    Returns:
        conversations: (B) prompt and draft.
        ratings: (B, aspects) whether the draft has the aspect; some of them are wrong.
        preferences: (chosen, rejected) indices into B, for every pair of drafts of one prompt.
    """
    conversations, ratings, preferences = [], [], []
    for _ in range(n_prompts):
        order = toy.sample_order(rng)
        prompt = toy.write_prompt(order, rng)
        first = len(conversations)
        think_format = "think" if rng.random() < 0.5 else "plain"
        utilities = []
        for _ in range(DRAFTS):
            thinking, reply = toy.write_answer(order, toy.random_slips(rng), rng)
            text = join_thinking(thinking, reply, think_format)
            conversations.append([*user_turn(prompt), {"role": "assistant", "content": text}])
            utilities.append(toy.utility(order, reply))
            passed = toy.check(order, reply)
            ratings.append([passed[name] != (rng.random() < RATING_NOISE) for name in toy.ASPECTS])
        for a, b in itertools.combinations(range(DRAFTS), 2):
            pair = (first + a, first + b)
            if not toy.prefers_first(utilities[a], utilities[b], rng):
                pair = (first + b, first + a)
            preferences.append(pair)
    return conversations, ratings, preferences


def train_reward(base: Path, out: Path, steps: int, batch: int, seed: int) -> None:
    """Trains the reward model on preferences and ratings of new drafts in every step."""
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    prepare_tokenizer(tokenizer, "think")
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, pad_token_id=tokenizer.pad_token_id, **SAFE
    )
    rating_heads = torch.nn.Linear(model.config.hidden_size, len(toy.ASPECTS))
    trained = torch.nn.ModuleDict({"model": model, "ratings": rating_heads})

    def losses() -> Iterator[torch.Tensor]:
        rng = random.Random(f"reward-{seed}")
        while True:
            conversations, ratings, preferences = draft_batch(batch, rng)
            ids = tokenizer.apply_chat_template(conversations, return_dict=False)
            inputs = tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
            last = inputs["attention_mask"].sum(1) - 1  # (B) position of the last token
            hidden = model.model(**inputs).last_hidden_state[torch.arange(len(ids)), last]  # (B, hidden size)
            scores = model.score(hidden)[:, 0]  # (B)
            chosen, rejected = torch.tensor(preferences).T
            preference_loss = -logsigmoid(scores[chosen] - scores[rejected]).mean()
            rating_loss = binary_cross_entropy_with_logits(
                rating_heads(hidden), torch.tensor(ratings).float()
            )
            yield preference_loss + RATING_WEIGHT * rating_loss

    train(trained, losses(), steps, lr_matrix=0.005, lr_rest=5e-4)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    args = tyro.cli(Args)
    torch.manual_seed(args.seed)
    if args.what == "base":
        train_base(args.out, args.steps, args.batch, args.layers, args.seed)
    else:
        train_reward(args.base, args.out, args.steps, args.batch, args.seed)
