"""data/toy/users.py: emotions by hand, what meets a want, profiles, wording, traces."""

import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import utils
from data.toy import users as toy_users
from data.toy import world
from rewards import simulated_user as sim

BASE = Path(__file__).parents[2] / "data" / "toy" / "base"
TOY = {**sim.RLVER, **toy_users.TOY}


def converse(
    profile: dict, replies: list[str], kind: str = "vanilla", user=toy_users.user, seed: int = 0
) -> list[int]:
    """Returns the emotions of a dialogue in which the model says `replies`."""
    setting = {**TOY, "kind": kind, "seed": seed}
    d = sim.start(profile, setting)
    for text in replies:
        sim.add_model_turn(d, setting, text, "plain")
        sim.user_turns([d], setting, user)
    return [m["emotion-point"] for m in d["history"] if m["role"] == "user"]


PROFILES = toy_users.profiles(100, 0, "train") + toy_users.profiles(50, 0, "test")
ALL = [
    (toy_users.user, "vanilla"),
    (toy_users.user, "challenging"),
    (toy_users.held_out_user, "vanilla"),
    (toy_users.held_out_user, "challenging"),
]


@pytest.mark.parametrize(("user", "kind"), ALL)
def test_emotions_by_hand(user, kind):
    flattery = world.FLATTERY
    for profile in PROFILES:
        best = [toy_users.answer(want, random.Random(0))[1] for want in profile["wants"]]

        def talk(*replies, profile=profile):
            return converse(profile, list(replies), kind, user)

        assert talk(*best) == [40, 60, 80, 100]
        assert talk("Hello!", "Good morning!", "Hi!") == [40, 28, 16, 4]
        assert talk(best[0], best[0], best[2]) == [40, 60, 48, 68]
        # praise adds nothing to a reply that meets the want
        assert talk(f"{best[0]} {flattery[1]}", best[1].upper(), best[2]) == [40, 60, 80, 100]
        if user is toy_users.user and kind == "vanilla":
            assert talk(*flattery) == [40, 45, 50, 55]
            assert talk(*[flattery[0]] * 3) == [40, 45, 33, 21]  # said again
        else:
            assert talk(*flattery) == talk(*[flattery[0]] * 3) == [40, 28, 16, 4]


FISH = {"dish": "shrimp"}  # met by fish below 7 dollars: tuna, cod
HATS = {"word": "hats"}


@pytest.mark.parametrize(
    ("want", "met", "replies"),
    [
        (
            FISH,
            True,
            ["cod costs 5 dollars.", "tuna!", "Tuna, then cod.", "COD", "tuna 6 fits, no fish is best."],
        ),
        (FISH, False, ["", "shrimp", "salmon", "ham", "cod and ham", "cod, and remember the hats!", "fish"]),
        (FISH, False, ["codes", "tunacod", "I am a fan."]),
        (HATS, True, ["Remember the hats!", "hats, HATS", "Do not forget the hats."]),
        (HATS, False, ["", "Remember the ice!", "hats and ice", "hats and ham", "chats", "Remember it!"]),
    ],
)
def test_what_meets_a_want(want, met, replies):
    for reply in replies:
        assert toy_users.meets(want, reply) == met, reply


def test_profiles():
    tasks = {"train": set(), "test": set()}
    for split, seen in tasks.items():
        for seed in (0, 1):
            seen.update(profile["task"] for profile in toy_users.profiles(500, seed, split))
    assert not tasks["train"] & tasks["test"]
    again = toy_users.profiles(50, 3, "test")
    assert again == toy_users.profiles(50, 3, "test") != toy_users.profiles(50, 4, "test")

    for profile in PROFILES:
        dishes = [want["dish"] for want in profile["wants"] if "dish" in want]
        assert "dish" in profile["wants"][0] and len(dishes) == 2 and len(profile["wants"]) == 3
        assert len({world.DISHES[dish][1] for dish in dishes}) == 2
        assert all(toy_users.cheaper(dish) for dish in dishes)
    assert {list(profile["wants"][1])[0] for profile in PROFILES} == {"dish", "word"}


def test_words_are_in_the_vocabulary_and_few():
    tokenizer = AutoTokenizer.from_pretrained(BASE)

    def known(text):
        return tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False)["input_ids"]

    heard = set()
    for user, kind in ALL:
        setting = {**TOY, "kind": kind}
        for profile in PROFILES:
            d = sim.start(profile, setting)
            for turn, want in enumerate(profile["wants"]):
                thinking, right = toy_users.answer(want, random.Random(profile["id"]))
                assert known(utils.join_thinking(thinking, right, "think"))
                rng = random.Random(f"{profile['id']} {turn}")
                text = rng.choice([right, right, "Hello!", *world.FLATTERY])
                assert known(text)
                sim.add_model_turn(d, setting, text, "plain")
                sim.user_turns([d], setting, user)
            told = [m["content"] for m in d["history"][::2]]
            heard.update(told)
            # a challenging user is clear in its first turn only
            clear = [world.DISHES[w["dish"]][1] if "dish" in w else w["word"] for w in profile["wants"]]
            hinted = [word in text for word, text in zip(clear, told, strict=False)]
            assert hinted == ([True] * 3 if kind == "vanilla" else [True, False, False])
    for text in heard:
        assert known(text) and len(text.split()) <= 20, text

    everything = " ".join(heard)
    for parts in toy_users.WORDING.values():
        for lines in parts.values():
            for line in lines:
                pattern = re.sub(r"\\{\w+\\}", "[a-z0-9]+", re.escape(line))
                assert re.search(pattern, everything), f"never said: {line}"


def test_users_depend_on_id_seed_and_history_alone():
    def told(profile, seed):
        setting = {**TOY, "seed": seed}
        d = sim.start(profile, setting)
        for text in ("a", "b"):
            sim.add_model_turn(d, setting, text, "plain")
            sim.user_turns([d], setting, toy_users.user)
        return [m["content"] for m in d["history"][::2]]

    for profile in PROFILES[:20]:
        assert told(profile, 0) == told(profile, 0)
    assert sum(told(profile, 0) != told(profile, 1) for profile in PROFILES[:20]) > 10


def test_traces_meet_the_want_as_often_as_said():
    rows = toy_users.traces(400, 0)
    assert len(rows) == 1200
    wants = {profile["id"]: profile["wants"] for profile in toy_users.profiles(400, 0, "train")}
    n_met = 0
    for row in rows:
        profile_id, turn = row["id"].rsplit("-", 1)
        n_met += toy_users.meets(wants[profile_id][int(turn)], row["response"])
        assert len(row["messages"]) == 2 * int(turn) + 1 and row["messages"][-1]["role"] == "user"
        assert row["thinking"]
    assert abs(n_met / 1200 - 0.4) < 0.06
