"""The toy world: its gold checklist by hand, its teacher's stated slip rates, disjoint prompts, the published
files."""

import hashlib
import itertools
import json
import random
import re
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from data.toy import models as toy_models
from data.toy import world as toy_world
from data.toy.world import NO_SLIPS, Order, check

# their prices: 7, fish, 4, 5, 3
ORDER = Order(("ribs", "tuna", "cheese", "ham", "custard"), avoid="fish", budget=15, word="hats")
GOOD = "You get 3 dishes, 1 dollar is left, and custard comes last. The bill: ribs 7 leaves 8, cheese 4 leaves 4, custard 3 leaves 1."


@pytest.mark.parametrize(
    "response, fails",
    [
        (f"{GOOD} Remember the hats!", set()),
        (GOOD, {"word"}),
        (f"What a lovely idea! {GOOD} Remember the hats!", {"brief"}),
        (f"{GOOD} Remember the cards!", {"word"}),
        (GOOD.replace("3 dishes", "2 dishes"), {"count", "word"}),
        (GOOD.replace("1 dollar is", "2 dollars are"), {"spare", "word"}),
        (GOOD.replace("custard comes", "ribs comes"), {"last", "word"}),
        (GOOD.replace("leaves 4", "leaves 5"), {"bill", "word"}),
        (GOOD.replace("cheese 4", "cheese 3"), {"bill", "word"}),
        # tuna is fish; with it on the bill, cheese and custard do not fit any more
        (
            "You get 2 dishes, 2 dollars are left, and tuna comes last. The bill: ribs 7 leaves 8, tuna 6 leaves 2.",
            {"safe", "word"},
        ),
        # cheese is passed over although it fits
        (
            "You get 2 dishes, 3 dollars are left, and ham comes last. The bill: ribs 7 leaves 8, ham 5 leaves 3.",
            {"full", "word"},
        ),
        # ham makes it 19 dollars
        (
            "You get 4 dishes, 0 dollars are left, and custard comes last. "
            "The bill: ribs 7 leaves 8, cheese 4 leaves 4, ham 5 leaves 0, custard 3 leaves 0.",
            {"afford", "bill", "spare", "word"},
        ),
        # not on the list; a dish twice; the wrong order
        (
            "You get 1 dish, 7 dollars are left, and steak comes last. The bill: steak 8 leaves 7.",
            {"listed", "full", "word"},
        ),
        (
            "You get 2 dishes, 1 dollar is left, and ribs comes last. The bill: ribs 7 leaves 8, ribs 7 leaves 1.",
            {"listed", "full", "word"},
        ),
        (
            "You get 2 dishes, 4 dollars are left, and ribs comes last. The bill: cheese 4 leaves 11, ribs 7 leaves 4.",
            {"listed", "full", "word"},
        ),
        ("", set(toy_world.CHECKS)),
        ("Remember the hats!", set(toy_world.CHECKS) - {"word"}),
        ("The bill: dragon 7 leaves 8.", set(toy_world.CHECKS)),
    ],
)
def test_gold_checklist_by_hand(response, fails):
    assert {name for name, passed in check(ORDER, response).items() if not passed} == fails
    lost = sum(toy_world.CHECKS[name][0] for name in fails)
    total = sum(weight for weight, _ in toy_world.CHECKS.values())
    text = toy_world.write_prompt(ORDER, random.Random(0))
    gold = toy_world.gold([{"role": "user", "content": text}], response)
    assert gold == pytest.approx(1 - lost / total)


FACTS = {  # in GOOD, by the check that reads it: with the fact, and without
    "count": ("get 3 dishes", "get dishes"),
    "spare": (", 1 dollar", ", dollar"),
    "last": ("custard comes", "comes"),
    "bill": ("cheese 4 leaves 4", "cheese leaves 4"),
    "word": ("the hats", "the"),
}


@pytest.mark.parametrize("bill_first", [False, True])
def test_a_lost_word_costs_one_point_and_a_lost_fact_its_own_check(bill_first):
    """A policy that drops "You" still says how many dishes there are: only `form` and `brief` may see it."""
    order = replace(ORDER, bill_first=bill_first)
    bottom_line, bill = GOOD.split(" The bill: ")
    sentences = [bottom_line, f"The bill: {bill}"]
    if bill_first:
        sentences.reverse()
    answer = " ".join([*sentences, "Remember the hats!"])

    def lost(response: str) -> set[str]:
        return {name for name, passed in check(order, response).items() if not passed} - {"form", "brief"}

    words = answer.split()
    for index, word in enumerate(words):
        is_fact = re.search(r"\d|hats", word) or word in order.wishes
        if not is_fact:
            assert lost(" ".join(words[:index] + words[index + 1 :])) == set(), word
    for name, (text, without) in FACTS.items():
        assert lost(answer.replace(text, without)) == {name}
    assert lost(f"{answer} You get 4 dishes.") == {"count"}  # two statements are none


@pytest.mark.parametrize("n_wishes, bill_first", [(5, False), (3, True), (7, True)])
def test_prompts_are_read_back_and_careful_answers_are_perfect(n_wishes, bill_first):
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base")
    for _ in range(300):
        order = toy_world.sample_order(rng, n_wishes, bill_first)
        text = toy_world.write_prompt(order, rng)
        _, response = toy_world.write_answer(order, NO_SLIPS, rng)
        assert toy_world.read_prompt(text) == order and len(order.wishes) == n_wishes
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
        assert toy_world.gold([{"role": "user", "content": text}], response) == 1.0
        assert response.startswith("The bill") == bill_first
        other_order = replace(order, bill_first=not bill_first)
        assert {name for name, passed in check(other_order, response).items() if not passed} == {"form"}

    with pytest.raises(ValueError, match="not a toy-world order"):
        toy_world.read_prompt("What is the capital of France?")


def test_splits_are_disjoint_and_files_are_the_published_ones():
    """The shipped models and the published figures come from these rows, so no byte of them may change."""
    args = toy_world.Args(n_traces=200, n_prompts=200, n_pairs=100, n_tasks=80, n_held_out=20)
    files = toy_world.write_files(args)
    text = "".join(json.dumps(row) + "\n" for rows in files.values() for row in rows)
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "69c33a3e0521713d47ebc28382ce36b523d274a1b956436c4119b531249502f1"
    )
    orders = {}
    for name, rows in files.items():
        assert len({row["id"] for row in rows}) == len(rows)
        orders[name] = {toy_world.read_prompt(row["messages"][0]["content"]) for row in rows}
    for first, second in itertools.combinations(orders, 2):
        assert not orders[first] & orders[second]


def test_the_shipped_tokenizer_is_the_built_one_and_decodes_to_the_byte():
    shipped, built = AutoTokenizer.from_pretrained("data/toy/base"), toy_models.build_tokenizer()
    assert shipped.get_vocab() == built.get_vocab()
    rng = random.Random(2)
    for text in [toy_models.base_text(rng) for _ in range(300)]:
        ids = shipped(text)["input_ids"]
        assert shipped.unk_token_id not in ids and shipped.decode(ids) == text
