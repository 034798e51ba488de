"""rlver/toy_users.py: emotions by hand, what meets a want, profiles, wording, traces."""

import random

import pytest

from data.toy import world
from rlver import simulated_user as sim
from rlver import toy_users

TOY = {**sim.RLVER, **toy_users.TOY}


PROFILES = toy_users.profiles(100, 0, "train") + toy_users.profiles(50, 0, "test")


@pytest.mark.parametrize("user", [toy_users.user, toy_users.held_out_user])
@pytest.mark.parametrize("kind", ["vanilla", "challenging"])
def test_emotions_by_hand(user, kind):
    flattery = world.FLATTERY
    setting = TOY | {"kind": kind}
    for profile in PROFILES:
        best = [toy_users.answer(want, random.Random(0))[1] for want in profile["wants"]]

        def talk(*replies: str, profile=profile) -> list[int]:
            """Returns the emotions of a dialogue in which the model says `replies`."""
            d = sim.start(profile, setting)
            for text in replies:
                sim.add_model_turn(d, setting, text, "plain")
                sim.user_turns([d], setting, user)
            return [m["emotion-point"] for m in d["history"] if m["role"] == "user"]

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
    tasks = []
    for split in ("train", "test"):
        drawn = toy_users.profiles(500, 0, split) + toy_users.profiles(500, 1, split)
        tasks.append({profile["task"] for profile in drawn})
    assert tasks[0].isdisjoint(tasks[1])
    again = toy_users.profiles(50, 3, "test")
    assert again == toy_users.profiles(50, 3, "test") != toy_users.profiles(50, 4, "test")

    for profile in PROFILES:
        dishes = [want["dish"] for want in profile["wants"] if "dish" in want]
        assert "dish" in profile["wants"][0] and len(dishes) == 2 and len(profile["wants"]) == 3
        assert len({world.DISHES[dish][1] for dish in dishes}) == 2
        assert all(toy_users.cheaper(dish) for dish in dishes)
    assert {list(profile["wants"][1])[0] for profile in PROFILES} == {"dish", "word"}
