"""Traits of planning: win rates by hand, malformed replies, and whole runs with an HTTP judge that counts
words in plans."""

import csv
import json
import re
from pathlib import Path

import pytest

from benchmarks import traits
from rlmt.data import read_log

WORDS = ("budget", "theme", "step")  # the traits of the plans here; all plans have as many steps

# --- plans and a judge


def plan(**counts: int) -> str:
    """A plan that has every word so many times, among headings and text in braces."""
    lines = [f"- {word} {{n}}" for word, n in counts.items() for _ in range(n)]
    return "# Plan 1\nFirst of all {this}.\n" + "\n".join(lines) + "\n"


def row(i: int, thinking: str, **more) -> dict:
    messages = [{"role": "user", "content": f"Plan dinner number {i} {{for 2}}."}]
    common = {"id": f"t{i}", "messages": messages, "thinking": thinking, "status": "ok", "temperature": 0.7}
    return common | more


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """40 prompts. budget: the RL checkpoint has more in 30, as many in 6, fewer in 4; theme: 10, 0, 30."""
    rl = []
    for i in range(40):
        budget = (i < 30) + (i < 36)
        rl.append(row(i, plan(budget=budget, theme=3 * (i < 10), step=2)))
    sft = [row(i, plan(budget=1, theme=1, step=2)) for i in range(40)]
    return {
        "generations": write(tmp_path / "rl-secret" / "generations.jsonl", rl),
        "baseline": write(tmp_path / "sft-secret" / "generations.jsonl", sft),
    }


def trait(word: str) -> dict:
    return {"name": f"More {word}", "description": f"uses the word '{word}'"}


def traits_file(path: Path, words=WORDS) -> str:
    path.write_text(json.dumps({"traits": [trait(word) for word in words]}))
    return str(path)


def plans_of(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"<plan 1>\n(.*?)\n</plan 1>\s*<plan 2>\n(.*?)\n</plan 2>", text, re.S)
    assert found
    return found


def counting_judge(text: str, n: int = 0) -> str:
    """Reads what it is sent, counts words in the two plans, and replies to all three kinds of request."""
    if "Several readers" in text:
        words = [word for word in WORDS if f"'{word}'" in text]
        return json.dumps({"traits": [trait(word) for word in words]})
    pairs = plans_of(text)
    if "# Traits" not in text:
        first, second = ["".join(plans) for plans in zip(*pairs)]
        words = [word for word in WORDS if first.count(word) != second.count(word)]
        return json.dumps({"traits": [trait(word) for word in words]})
    verdicts = {"comparison": "I {counted}."}
    for i, word in enumerate(re.findall(r"^T\d+\. .*'(\w+)'$", text, re.M), 1):
        first, second = [plan.count(word) for plan in pairs[0]]
        verdicts[f"T{i}"] = "same" if first == second else "12"[second > first]
    return "```json\n" + json.dumps(verdicts) + "\n```"


def run(server, out: Path, files: dict, **more) -> dict:
    traits.main(traits.Args(**files, judge="j", judge_url=server.url, out=str(out), **more))
    return json.loads((out / "summary.json").read_text())


def sent(server) -> list[str]:
    return [request["messages"][-1]["content"] for request, _ in server.requests]


# --- arithmetic by hand

TRAITS = [{"name": "a", "description": "A"}]


def score(orders: list[tuple], max_invalid: float = 1.0) -> dict:
    """The score of what the judge said with --generations' plan first, and second; None: nothing that can be
    read."""
    rows = []
    for i, pair in enumerate(orders):
        for model_is, choice in enumerate(pair, 1):
            choices = {"a": choice} if choice else None
            rows.append({"id": i, "model_is": model_is, "choices": choices, "invalid": "prose"})
    return traits.score_verdicts(rows, TRAITS, max_invalid, 0)


@pytest.mark.parametrize(
    "orders, rate, counts, flips, n",
    [
        ([("1", "2")], 1.0, (2, 0, 0), 0.0, 1),
        ([("same", "same")], 0.5, (0, 2, 0), 0.0, 1),
        ([("1", "1")], 0.5, (1, 0, 1), 1.0, 1),
        (
            [("1", "2"), ("1", "2"), ("same", "1"), ("2", "1")],
            0.5625,
            (4, 1, 3),
            0.25,
            4,
        ),  # (2 + 2 + 0.5 + 0) / 8
        (
            [("1", "2"), ("1", None), (None, "1"), (None, None)],
            1.0,
            (2, 0, 0),
            0.0,
            1,
        ),  # one order counts for nothing
    ],
)
def test_win_rate_by_hand(orders, rate, counts, flips, n):
    out = score(orders)
    found = out["traits"]["a"]
    assert (found["win_rate"], found["flip_rate"], out["n"]) == (rate, flips, n)
    assert (found["wins"], found["ties"], found["losses"]) == counts
    assert out["n_left_out"] == len(orders) - n and out["n_replies"] == 2 * len(orders)
    assert out["n_invalid"] == sum(pair.count(None) for pair in orders)


def test_no_win_rate_above_the_share_of_invalid_replies():
    orders = [("1", "2")] * 9 + [(None, "2")]  # 1 of 20
    assert score(orders, 0.05)["traits"]["a"]["win_rate"] == 1
    found = score(orders, 0.049)["traits"]["a"]
    assert found["win_rate"] is None and found["withheld"] == 1
    with pytest.raises(ValueError, match="the first error: prose"):
        score([(None, None)] * 2)


# --- what can be read, and what cannot


@pytest.mark.parametrize(
    "text",
    [
        '{"T2": "same", "T1": 1}',
        '{"comparison": "{a} \\"T1\\": \\"2\\"", "T1": "1", "T2": "same"}',
        'Here it is:\n```json\n{"comparison": "x\ny", "T1": "1", "T2": "same"}\n```\nDone.',
    ],
)
def test_readable_verdicts(text):
    assert traits.read_verdicts(text, 2) == ["1", "same"]


MALFORMED = ["", "1", "same", "null", "[]", "{}", "T1: 1, T2: 2", '{"T1": "1"}', '{"t1": "1", "t2": "2"}']
MALFORMED += [
    '{"T1": "1", "T1": "2", "T2": "1"}',
    '{"T1": "1", "T2": "2", "note": "x"}',
    '{"T1": "1", "T2": "2"',
]
MALFORMED += [
    '[{"T1": "1", "T2": "2"}]',
    '{"T1": "1", "T2": "2"} or {"T1": "2", "T2": "2"}',
    "{" * 5000,
    "}{",
]
for value in ('""', "null", "true", "1.0", "3", '"1 "', '"Same"', '"plan 2"', '["1"]', '"１"', "NaN"):
    MALFORMED.append(f'{{"T1": "1", "T2": {value}}}')


@pytest.mark.parametrize("text", MALFORMED)
def test_no_malformed_reply_is_a_verdict_or_a_trait(text):
    with pytest.raises(ValueError):
        traits.read_verdicts(text, 2)
    with pytest.raises(ValueError):
        traits.read_traits(text, 10)


def test_lists_of_traits():
    text = 'Traits:\n{"traits": [{"name": " Budget \\n first ", "description": "d", "example": "x"}]}'
    assert traits.read_traits(text, 1) == [{"name": "Budget first", "description": "d"}]
    assert traits.read_traits('{"traits": []}', 1) == []
    good = {"name": "n", "description": "d"}
    for listed in (
        None,
        good,
        [1],
        [{"name": "n"}],
        [good | {"name": " "}],
        [good, good | {"name": "N "}],
        [good] * 4,
    ):
        with pytest.raises(ValueError):
            traits.read_traits(json.dumps({"traits": listed}), 3)


# --- pairs


def test_every_row_that_is_not_used_is_counted(tmp_path):
    rl = [row(0, "old", step=1), row(0, "new", step=2), row(0, "second sample", step=2), row(2, " \n")]
    rl += [row(3, "cut", status="truncated"), row(4, "x", temperature=0.0), row(5, "alone"), row(6, "y")]
    sft = [row(0, "plan 0"), row(6, "z", status="nested"), row(6, "fine")]
    paths = {"generations": write(tmp_path / "a.jsonl", rl), "baseline": write(tmp_path / "b.jsonl", sft)}
    pairs, not_used = traits.match_plans(traits.Args(**paths, temperature=0.7))
    found = sorted((pair["id"], pair["model"], pair["baseline"]) for pair in pairs)
    assert found == [("t0", "new", "plan 0"), ("t6", "y", "fine")]
    assert not_used == {
        "another row of its id": 2,
        "no thinking": 1,
        "status truncated": 1,
        "status nested": 1,
        "another temperature": 1,
        "no plan in the other file": 1,
    }


def test_order_of_pairs_is_by_seed_and_id_alone(tmp_path):
    rows = [row(i, "x") for i in range(30)]
    whole = write(tmp_path / "a.jsonl", rows)

    def order(path: str, seed: int) -> list[str]:
        pairs, _ = traits.match_plans(traits.Args(generations=path, baseline=whole, seed=seed))
        return [pair["id"] for pair in pairs]

    first = order(whole, 0)
    assert order(write(tmp_path / "b.jsonl", rows[::-1]), 0) == first != order(whole, 1)
    kept = {row["id"] for row in rows[::2]}
    assert order(write(tmp_path / "c.jsonl", rows[::2]), 0) == [i for i in first if i in kept]


@pytest.mark.parametrize(
    "change, args, message",
    [
        ({"messages": [{"role": "user", "content": "other"}]}, {}, "has other 'messages'"),
        ({"temperature": 0.1}, {}, "several temperatures; choose one with --temperature: [0.1, 0.7]"),
        ({}, {"extract_pairs": 9}, "none of 3 pairs is left to compare"),
        ({}, {"baseline": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({}, {"traits": "nowhere.json"}, "--traits: [Errno 2]"),
        ({}, {"traits": "a.jsonl"}, "--traits a.jsonl: no JSON object"),
    ],
)
def test_bad_input(change, args, message, tmp_path, monkeypatch, exits):
    monkeypatch.chdir(tmp_path)
    rows = [row(i, "x") for i in range(3)]
    write(Path("b.jsonl"), rows)
    write(Path("a.jsonl"), [rows[0], rows[1] | change, rows[2]])
    fields = {"generations": "a.jsonl", "baseline": "b.jsonl", "extract_pairs": 1, "dry_run": True, **args}
    assert message.replace("traits:", "traits nowhere.json:") in exits(traits.main, traits.Args(**fields))


# --- whole runs


def test_a_known_difference_gives_the_known_win_rates(serve, files, tmp_path):
    server = serve(counting_judge)
    chosen = traits_file(tmp_path / "t.json")
    out = run(server, tmp_path / "run", files, traits=chosen)
    rates = {name: found["win_rate"] for name, found in out["traits"].items()}
    assert rates == {"More budget": 0.825, "More theme": 0.25, "More step": 0.5}
    budget = out["traits"]["More budget"]
    assert (budget["wins"], budget["ties"], budget["losses"], budget["flip_rate"]) == (60, 12, 8, 0)
    assert budget["interval"][0] < 0.825 < budget["interval"][1]
    assert (out["n"], out["n_left_out"], out["n_replies"], out["n_invalid"], len(sent(server))) == (
        40,
        0,
        80,
        0,
        80,
    )
    assert not any("secret" in text or "sft" in text.lower() for text in sent(server))  # names are hidden
    index = list(csv.DictReader(open(tmp_path / "runs.csv")))
    assert {line["metric"]: float(line["value"]) for line in index} == rates

    swapped = dict(zip(files, reversed(files.values())))
    again = run(serve(counting_judge), tmp_path / "swapped", swapped, traits=chosen)["traits"]
    assert {name: 1 - found["win_rate"] for name, found in again.items()} == pytest.approx(rates)
    # a judge that likes the first place finds nothing
    likes_first = serve(lambda text, n: '{"T1": "1", "T2": "2", "T3": "same"}')
    found = run(likes_first, tmp_path / "first", files, traits=chosen)["traits"].values()
    assert [(numbers["win_rate"], numbers["flip_rate"]) for numbers in found] == [
        (0.5, 1),
        (0.5, 1),
        (0.5, 0),
    ]


def test_traits_are_found_merged_and_compared_on_other_prompts(serve, files, tmp_path):
    server = serve(counting_judge)
    out = run(server, tmp_path / "run", files, extract_pairs=12, batch_pairs=4)
    kinds = {"How do the two writers": 3, "Several readers": 1, "# Traits": 56}
    assert {kind: sum(kind in text for text in sent(server)) for kind in kinds} == kinds
    stored = json.loads((tmp_path / "run" / "traits.json").read_text())
    assert stored["traits"] == [trait("budget"), trait("theme")]  # all plans have two steps
    plans = {row["id"]: row["thinking"].strip() for row in read_log(Path(files["generations"]))}
    asked = {}
    for text in sent(server):
        if "How do the two writers" in text:
            asked[tuple(f"t{i}" for i in re.findall(r"number (\d+)", text))] = plans_of(text)
    for batch in stored["batches"]:  # in all pairs of a batch writer 1 is the same
        ours = [pair[batch["model_is"] - 1] for pair in asked.pop(tuple(batch["prompts"]))]
        assert ours == [plans[i] for i in batch["prompts"]] and len(ours) == 4
    drawn = {traits.batches(traits.Args(seed=seed), [{}])[0][0] for seed in range(9)}
    assert not asked and drawn == {1, 2}
    compared = {row["id"] for row in read_log(tmp_path / "run" / "verdicts.jsonl")}
    assert len(compared) == out["n"] == 28 and compared.isdisjoint(stored["prompts"])

    again = run(
        serve(counting_judge), tmp_path / "again", files, traits=str(tmp_path / "run" / "traits.json")
    )
    assert again["traits"] == out["traits"]
    assert again["fingerprint"] != out["fingerprint"]  # a judge at another address


def test_the_prompts_can_be_given_as_files(serve, files, tmp_path, exits):
    """Each by itself, verbatim; braces of the plans stay. Another wording is another fingerprint."""
    folder = tmp_path / "mine"
    folder.mkdir()
    system = '<|im_start|>system\nMINE {"T1": x}<|im_end|>\n<|im_start|>user\n'
    (folder / "compare.txt").write_text(system + "{$conversation}\n{$plans}\n# Traits\n{$traits}<|im_end|>")
    server = serve(counting_judge)
    args = {**files, "extract_pairs": 10}
    own = run(server, tmp_path / "own", args)
    theirs = run(server, tmp_path / "theirs", args, template=str(folder))
    assert theirs["traits"] == own["traits"]  # this judge counts words, whatever it is asked
    assert (own["wording"], theirs["wording"][:5]) == ("our own", "mine ")
    assert own["fingerprint"] != theirs["fingerprint"]
    prompts = [request["messages"] for request, _ in server.requests if "MINE" in str(request["messages"])]
    assert len(prompts) == 60 and prompts[0][0] == {"role": "system", "content": 'MINE {"T1": x}'}
    assert "for 2}" in prompts[0][1]["content"] and "First of all {this}." in prompts[0][1]["content"]

    (folder / "merge.txt").write_text("Merge them.")
    for template, message in ((folder, "no {$lists}"), (tmp_path / "none", "no folder with extract.txt")):
        assert message in exits(run, server, tmp_path / "bad", args, template=str(template))
        assert not (tmp_path / "bad").exists()


def test_malformed_replies_are_asked_again_then_left_out(serve, files, tmp_path):
    """Prompts get malformed replies to every request with the RL plan first; prompt 39 only the first time it
    is asked."""

    replies = MALFORMED + ["prose"] * 40

    def judge(text: str, n: int) -> str:
        i = int(re.search(r"number (\d+)", text)[1])
        is_rl_first = plans_of(text)[0][0].count("theme") != 1  # the baseline has one theme
        if is_rl_first and (i < 35 or (i == 39 and n == 0)):
            return replies[i]
        return counting_judge(text)

    server = serve(judge)
    chosen = traits_file(tmp_path / "t.json", ("budget", "theme"))  # two, as in MALFORMED
    out = run(server, tmp_path / "run", files, traits=chosen, max_invalid=0.5)
    assert (out["n"], out["n_left_out"], out["n_invalid"], out["n_replies"]) == (5, 35, 35, 80)
    assert out["traits"]["More budget"]["win_rate"] == 0.1  # prompts 35 to 39
    assert len(sent(server)) == 80 + 35 * 3 + 1


def test_no_traits_or_no_verdicts_end_the_run(serve, files, tmp_path, exits):
    for number, (step, reply, message) in enumerate(
        [
            ("How do the two", "They are alike.", "no traits to merge"),
            ("How do the two", '{"traits": []}', "no traits to merge"),
            ("Several readers", '{"traits": [{"name": "x"}]}', "no merged traits"),
            ("# Traits", "same", "no prompt has a readable reply"),
        ]
    ):
        server = serve(
            lambda text, n, step=step, reply=reply: reply if step in text else counting_judge(text)
        )
        out = tmp_path / f"run{number}"
        assert message in exits(run, server, out, files, extract_pairs=20)
        assert not (out / "summary.json").exists()
