"""Traits of planning: hand-worked win rates, malformed replies, and whole runs with an HTTP judge that counts words in plans."""

import csv
import json
import math
import re
from pathlib import Path

import pytest

from rlmt import endpoint
from benchmarks import trait_judging, traits
from rlmt import data as rlmt_data

ROOT = Path(__file__).parents[2]
WORDS = ("budget", "theme", "step")  # the traits of the plans here; all plans have as many steps

# --- plans and a judge


def plan(**counts: int) -> str:
    """A plan that has every word so many times, among headings and text in braces."""
    lines = [f"- {word} {{n}}" for word, n in counts.items() for _ in range(n)]
    return "# Plan 1\nFirst of all {this}.\n" + "\n".join(lines) + "\n"


def row(i, thinking: str, **more) -> dict:
    messages = [{"role": "user", "content": f"Plan dinner number {i} {{for 2}}."}]
    return {
        "id": f"t{i}",
        "messages": messages,
        "thinking": thinking,
        "response": "r",
        "status": "ok",
        "temperature": 0.7,
        **more,
    }


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """40 prompts. budget: the RL checkpoint has more in 30, as many in 6, fewer in 4; theme: 10, 0, 30."""
    rl = [
        row(i, plan(budget=2 if i < 30 else 1 if i < 36 else 0, theme=3 if i < 10 else 0, step=2))
        for i in range(40)
    ]
    sft = [row(i, plan(budget=1, theme=1, step=2)) for i in range(40)]
    return {
        "generations": write(tmp_path / "rl-secret" / "generations.jsonl", rl),
        "baseline": write(tmp_path / "sft-secret" / "generations.jsonl", sft),
    }


def traits_file(path: Path, words=WORDS) -> str:
    path.write_text(
        json.dumps({"traits": [{"name": f"More {w}", "description": f"uses the word '{w}'"} for w in words]})
    )
    return str(path)


def plans_of(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"<plan (\d)>\n(.*?)\n</plan \1>", text, re.S)
    assert found and [n for n, _ in found] == ["1", "2"] * (len(found) // 2)
    return [(found[i][1], found[i + 1][1]) for i in range(0, len(found), 2)]


def most_of(text: str) -> int:
    return int(re.search(r"at most (\d+)", text)[1])


def counting_judge(text: str, n: int = 0):
    """Reads what it is sent, counts words in the two plans, and replies to all three kinds of request."""
    if "Several readers" in text:
        lines = re.findall(r"^- (.+?): (.+)$", text, re.M)
        traits = sorted(set(lines), key=lambda t: (-lines.count(t), t))[: most_of(text)]
        return json.dumps({"traits": [{"name": a, "description": b} for a, b in traits]})
    pairs = plans_of(text)
    if "# Traits" in text:
        (first, second), words = pairs[0], re.findall(r"^T\d+\. .*'(\w+)'$", text, re.M)
        more = [first.count(w) - second.count(w) for w in words]
        verdicts = {f"T{i}": "1" if m > 0 else "2" if m < 0 else "same" for i, m in enumerate(more, 1)}
        return "```json\n" + json.dumps({"comparison": "I {counted}.", **verdicts}) + "\n```"
    total = lambda side, word: sum(p[side].count(word) for p in pairs)
    differ = [w for w in WORDS if total(0, w) != total(1, w)]
    return json.dumps(
        {
            "traits": [{"name": f"More {w}", "description": f"uses the word '{w}'"} for w in differ][
                : most_of(text)
            ]
        }
    )


def run(server, out: Path, files: dict, **more) -> dict:
    traits.main(traits.Args(**files, judge="j", judge_url=server.url, out=str(out), **more))
    return json.loads((out / "summary.json").read_text())


def sent(server) -> list[str]:
    return [request["messages"][-1]["content"] for request, _ in server.requests]


# --- arithmetic by hand


TRAITS = [{"name": "a", "description": "A"}]


def verdicts(*orders: tuple[str | None, str | None]) -> list[dict]:
    """orders: what the judge said with --generations' plan first, and second; None: nothing that can be read."""
    return [
        {"id": i, "model_is": m, "choices": c and {"a": c}, "invalid": "" if c else "prose"}
        for i, pair in enumerate(orders)
        for m, c in zip((1, 2), pair)
    ]


@pytest.mark.parametrize(
    "orders, rate, counts, flips, n",
    [
        ([("1", "2")], 1.0, (2, 0, 0), 0.0, 1),
        ([("2", "1")], 0.0, (0, 0, 2), 0.0, 1),
        ([("same", "same")], 0.5, (0, 2, 0), 0.0, 1),
        ([("1", "1")], 0.5, (1, 0, 1), 1.0, 1),
        ([("1", "same")], 0.75, (1, 1, 0), 1.0, 1),
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
        ),  # one order alone counts for nothing
    ],
)
def test_win_rate_by_hand(orders, rate, counts, flips, n):
    out = trait_judging.score_verdicts(verdicts(*orders), TRAITS, 1.0, 0)
    t = out["traits"]["a"]
    assert (t["win_rate"], (t["wins"], t["ties"], t["losses"]), t["flip_rate"], out["n"]) == (
        rate,
        counts,
        flips,
        n,
    )
    assert (
        t["win_rate"] == (t["wins"] + t["ties"] / 2) / (2 * n)
        and t["interval"][0] <= rate <= t["interval"][1]
    )
    assert out["n_left_out"] == len(orders) - n and out["n_replies"] == 2 * len(orders)
    assert out["n_invalid"] == sum(c is None for pair in orders for c in pair)


def test_interval_is_the_binomial_one_over_prompts():
    """80 wins and 20 losses, each the same in both orders: the mean over resampled prompts is Binomial(100, 0.8) / 100. Had
    the 200 verdicts been resampled, the interval would be narrower by the root of 2: 0.745 to 0.855."""
    t = trait_judging.score_verdicts(verdicts(*[("1", "2")] * 80, *[("2", "1")] * 20), TRAITS, 0, 3)[
        "traits"
    ]["a"]
    mass = [math.comb(100, k) * 0.8**k * 0.2 ** (100 - k) for k in range(101)]
    exact = [next(k for k in range(101) if sum(mass[: k + 1]) >= q) / 100 for q in (0.025, 0.975)]
    assert t["win_rate"] == 0.8 and t["interval"] == pytest.approx(exact, abs=0.0101)
    two = trait_judging.score_verdicts(verdicts(("1", "2"), ("2", "1")), TRAITS, 0, 0)["traits"]["a"]
    assert two["interval"] == (0.0, 1.0)  # means 0, 0.5 and 1 with chances 1/4, 1/2, 1/4
    assert trait_judging.score_verdicts(verdicts(("1", "1"), ("2", "2")), TRAITS, 0, 0)["traits"]["a"][
        "interval"
    ] == (
        0.5,
        0.5,
    )


def test_no_win_rate_above_the_share_of_invalid_replies():
    rows = verdicts(*[("1", "2")] * 9, (None, "2"))  # 1 of 20
    t = trait_judging.score_verdicts(rows, TRAITS, 0.05, 0)["traits"]["a"]
    assert t["win_rate"] == 1 and "withheld" not in t
    out = trait_judging.score_verdicts(rows, TRAITS, 0.049, 0)
    t = out["traits"]["a"]
    assert t["win_rate"] is None and t["withheld"] == 1 and re.search(r"^a +none ", traits.table(out), re.M)
    with pytest.raises(ValueError, match="4 of 4 replies are invalid, the first: prose"):
        trait_judging.score_verdicts(verdicts((None, None), (None, None)), TRAITS, 1, 0)


# --- what can be read, and what cannot


@pytest.mark.parametrize(
    "text",
    [
        '{"T1": "1", "T2": "same"}',
        '{"T2": "same", "T1": 1}',
        '{"comparison": "{a} \\"T1\\": \\"2\\"", "T1": "1", "T2": "same"}',
        'Here it is:\n```json\n{"comparison": "x\ny", "T1": "1", "T2": "same"}\n```\nDone.',
        ' {"T1":"1","T2":"same"} ',
    ],
)
def test_readable_verdicts(text):
    assert trait_judging.read_verdicts(text, 2) == ["1", "same"]


MALFORMED = [
    "",
    " ",
    "1",
    "same",
    "null",
    "[]",
    "{}",
    '"1"',
    "T1: 1, T2: 2",
    "T1 = same\nT2 = same",
    "I cannot say.",
    "The plans are alike.",
    '{"T1": "1"}',
    '{"T1": "1", "T2": ""}',
    '{"T1": "1", "T2": null}',
    '{"T1": "1", "T2": true}',
    '{"T1": "1", "T2": 1.0}',
    '{"T1": "1", "T2": 3}',
    '{"T1": "1", "T2": 0}',
    '{"T1": "1", "T2": "3"}',
    '{"T1": "1", "T2": "1 "}',
    '{"T1": "1", "T2": "Same"}',
    '{"T1": "1", "T2": "SAME"}',
    '{"T1": "1", "T2": "plan 2"}',
    '{"T1": "1", "T2": "1 or 2"}',
    '{"T1": "1", "T2": "both"}',
    '{"T1": "1", "T2": ["1"]}',
    '{"T1": "1", "T2": {"more": "1"}}',
    '{"T1": "1", "T2": "１"}',
    '{"T1": "1", "T2": "A"}',
    '{"T1": "1", "T2": "2", "T3": "1"}',
    '{"t1": "1", "t2": "2"}',
    '{"1": "1", "2": "2"}',
    '{"T1": "1", "T3": "2"}',
    '{"T1": "1", "T1": "2", "T2": "1"}',
    '{"T1": "1", "T2": "2", "note": "x"}',
    '{"T1": "1", "T2": "2"',
    '{"T1": "1", "T2": "2',
    '{"comparison": "a long one',
    "{'T1': '1', 'T2': '2'}",
    '{"T1": "1", "T2": "2",}',
    '{"T1": 1 "T2": 2}',
    '["1", "2"]',
    '[{"T1": "1", "T2": "2"}]',
    '{"T1": "1", "T2": "2"} or {"T1": "2", "T2": "2"}',
    'see {plan 1}: {"T1": "1", "T2": "2"}',
    '{"verdicts": {"T1": "1", "T2": "2"}}',
    '"{\\"T1\\": \\"1\\", \\"T2\\": \\"2\\"}"',
    "{" * 5000,
    "[" * 100000,
    '{"a":' * 100000,
    "\x00",
    "<T1>1</T1><T2>2</T2>",
    '{"T1": "1", "T2": NaN}',
    '{"comparison": {"T1": "1", "T2": "2"}}',
    "}{",
]


def test_no_malformed_reply_is_a_verdict_or_a_trait():
    assert len(set(MALFORMED)) == len(MALFORMED) > 50
    for text in MALFORMED:
        with pytest.raises(ValueError):
            trait_judging.read_verdicts(text, 2)
        with pytest.raises(ValueError):
            trait_judging.read_traits(text, 10)


TRAIT = '{"name": "n", "description": "d"}'


@pytest.mark.parametrize(
    "listed",
    [
        "null",
        "{}",
        '"n"',
        TRAIT,
        "[1]",
        '["n: d"]',
        "[[]]",
        '[{"name": "n"}]',
        '[{"description": "d"}]',
        '[{"name": "n", "description": 1}]',
        '[{"name": null, "description": "d"}]',
        '[{"name": "", "description": "d"}]',
        '[{"name": "n", "description": " \\n"}]',
        f'[{TRAIT}, {{"name": "N ", "description": "e"}}]',
        json.dumps([{"name": "n" * 81, "description": "d"}]),
        json.dumps([{"name": "n", "description": "d" * 401}]),
        json.dumps([{"name": str(i), "description": "d"} for i in range(4)]),
    ],
)
def test_malformed_lists_of_traits(listed):
    with pytest.raises(ValueError):
        trait_judging.read_traits(f'{{"traits": {listed}}}', 3)


def test_readable_lists_of_traits():
    text = 'Traits:\n{"traits": [{"name": " Budget \\n first ", "description": "d", "example": "x"}]}'
    assert (
        trait_judging.read_traits(text, 1) == [{"name": "Budget first", "description": "d"}]
        and trait_judging.read_traits('{"traits": []}', 1) == []
    )


# --- pairs


def test_every_row_that_is_not_used_is_listed(tmp_path):
    rl = [
        row(0, "old", step=1),
        row(0, "new", step=2),
        row(0, "second sample", step=2),
        row(1, ""),
        row(2, " \n"),
        row(3, "cut", status="truncated"),
        row(4, "x", temperature=0.0),
        row(5, "alone"),
        row(6, "y"),
        {k: v for k, v in row(7, "").items() if k != "thinking"},
    ]
    sft = [row(i, f"plan {i}") for i in (0, 1, 2, 3, 4, 7, 8)] + [
        row(6, "z", status="nested"),
        row(6, "fine"),
    ]
    args = traits.Args(
        generations=write(tmp_path / "a.jsonl", rl),
        baseline=write(tmp_path / "b.jsonl", sft),
        temperature=0.7,
    )
    pairs, dropped = traits.match_plans(args)
    assert sorted((p["id"], p["model"], p["baseline"]) for p in pairs) == [
        ("t0", "new", "plan 0"),
        ("t6", "y", "fine"),
    ]
    listed = {(Path(d["file"]).name, d["line"]): d["reason"] for d in dropped}
    assert len(listed) == len(dropped) == len(rl) + len(sft) - 2 * len(pairs)
    assert listed == {
        ("a.jsonl", 1): "another row of its id",
        ("a.jsonl", 3): "another row of its id",
        ("a.jsonl", 4): "no thinking",
        ("a.jsonl", 5): "no thinking",
        ("a.jsonl", 6): "status truncated",
        ("a.jsonl", 7): "another temperature",
        ("a.jsonl", 8): "no plan in the other file",
        ("a.jsonl", 10): "no thinking",
        ("b.jsonl", 8): "status nested",
        **{("b.jsonl", n): "no plan in the other file" for n in (2, 3, 4, 5, 6, 7)},
    }


def test_order_of_pairs_is_by_seed_and_id_alone(tmp_path):
    rows = [row(i, "x") for i in range(30)]
    paths = [
        write(tmp_path / "a.jsonl", rows),
        write(tmp_path / "b.jsonl", rows[::-1]),
        write(tmp_path / "c.jsonl", rows[::2]),
    ]
    order = lambda path, seed: [
        p["id"] for p in traits.match_plans(traits.Args(generations=path, baseline=paths[0], seed=seed))[0]
    ]
    first = order(paths[0], 0)
    assert order(paths[1], 0) == first != order(paths[0], 1) and sorted(first) == sorted(order(paths[0], 1))
    kept = {r["id"] for r in rows[::2]}
    assert order(paths[2], 0) == [i for i in first if i in kept]


@pytest.mark.parametrize(
    "change, args, message",
    [
        ({"id": [1]}, {}, "a.jsonl:2: 'id' must be a text or a number, not [1]"),
        ({"status": None}, {}, "a.jsonl:2: no field 'status'"),
        ({"messages": [{"role": "user", "content": "other"}]}, {}, "has other 'messages'"),
        ({"temperature": 0.1}, {}, "several temperatures; choose one with --temperature: [0.1, 0.7]"),
        ({}, {"temperature": 0.3}, "none of 0 pairs is left"),
        ({}, {"extract_pairs": 9}, "none of 3 pairs is left to compare"),
        ({}, {"max_traits": 0}, "--max-traits 0: use 1 or more"),
        ({}, {"compare_pairs": -1}, "--compare-pairs -1: use 0 or more"),
        ({}, {"baseline": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({}, {"traits": "nowhere.json"}, "--traits nowhere.json: "),
        ({}, {"traits": "a.jsonl"}, "--traits a.jsonl: no JSON object"),
        ({}, {"traits": "empty.json"}, "--traits empty.json: 'traits' is empty"),
    ],
)
def test_bad_input(change, args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [row(i, "x") for i in range(3)]
    write(Path("b.jsonl"), rows)
    write(Path("a.jsonl"), [rows[0], rows[1] | change, rows[2]])
    Path("empty.json").write_text('{"traits": []}')
    with pytest.raises(SystemExit) as e:
        traits.main(
            traits.Args(
                **{
                    "generations": "a.jsonl",
                    "baseline": "b.jsonl",
                    "extract_pairs": 1,
                    "dry_run": True,
                    **args,
                }
            )
        )
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and len(err.splitlines()) == 1, err


# --- whole runs


def test_a_known_difference_gives_the_known_win_rates(serve, files, tmp_path, capsys):  # noqa: F811
    server, traits = serve(counting_judge), traits_file(tmp_path / "t.json")
    out = run(server, tmp_path / "run", files, traits=traits)
    t = out["traits"]
    assert {k: v["win_rate"] for k, v in t.items()} == {
        "More budget": 0.825,
        "More theme": 0.25,
        "More step": 0.5,
    }
    assert (t["More budget"]["wins"], t["More budget"]["ties"], t["More budget"]["losses"]) == (60, 12, 8)
    assert all(v["flip_rate"] == 0 for v in t.values()) and t["More step"]["interval"] == [0.5, 0.5]
    assert t["More budget"]["interval"][0] < 0.825 < t["More budget"]["interval"][1]
    assert (out["n"], out["n_left_out"], out["n_replies"], out["n_invalid"]) == (40, 0, 80, 0) and len(
        sent(server)
    ) == 80
    assert not any("secret" in text or "sft" in text.lower() for text in sent(server))  # names are hidden
    rows = rlmt_data.read_log(tmp_path / "run" / "verdicts.jsonl")
    assert {(r["id"], r["model_is"]) for r in rows} == {
        (f"t{i}", m) for i in range(40) for m in (1, 2)
    } and len(rows) == 80
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("More ")] == [
        "budget",
        "step",
        "theme",
    ]
    index = list(csv.DictReader(open(tmp_path / "runs.csv")))
    assert [(r["metric"], float(r["value"]), r["n"]) for r in index] == [
        ("More budget", 0.825, "40"),
        ("More theme", 0.25, "40"),
        ("More step", 0.5, "40"),
    ]

    swapped = run(
        serve(counting_judge), tmp_path / "swapped", dict(zip(files, reversed(files.values()))), traits=traits
    )["traits"]
    assert {k: v["win_rate"] for k, v in swapped.items()} == {
        k: pytest.approx(1 - v["win_rate"]) for k, v in t.items()
    }


def test_a_judge_that_likes_the_first_place_finds_nothing(serve, files, tmp_path):  # noqa: F811
    server = serve(lambda text, n: '{"T1": "1", "T2": "2", "T3": "same"}')
    t = run(server, tmp_path / "run", files, traits=traits_file(tmp_path / "t.json"))["traits"]
    assert [(v["win_rate"], v["interval"], v["flip_rate"]) for v in t.values()] == [
        (0.5, [0.5, 0.5], f) for f in (1.0, 1.0, 0.0)
    ]


def test_traits_are_found_merged_and_compared_on_other_prompts(serve, files, tmp_path, capsys):  # noqa: F811
    server = serve(counting_judge)
    split = {"extract_pairs": 12, "batch_pairs": 4}
    traits.main(
        traits.Args(
            **files,
            judge="j",
            judge_url=server.url,
            out=str(tmp_path / "run"),
            **split,
            price=(1, 1),
            dry_run=True,
        )
    )
    steps = {
        line.split(":")[0]: json.loads(line.partition(":")[2])
        for line in capsys.readouterr().out.splitlines()[2:5]
    }
    assert len(server.checks) == 1
    assert {k: v["calls"] for k, v in steps.items()} == {
        "extract": 3,
        "merge": 1,
        "compare": 56,
    } and not server.requests
    out = run(server, tmp_path / "run", files, **split)
    kinds = {"extract": "How do the two writers", "merge": "Several readers", "compare": "# Traits"}
    for name, mark in kinds.items():  # as many calls as foretold, none longer
        texts = [text for text in sent(server) if mark in text]
        assert len(texts) == steps[name]["calls"] and sum(map(len, texts)) / 4 <= steps[name]["input_tokens"]
    stored = json.loads((tmp_path / "run" / "traits.json").read_text())
    assert [t["name"] for t in stored["traits"]] == ["More budget", "More theme"]  # all plans have two steps
    plans = {
        side: {r["id"]: r["thinking"].strip() for r in rlmt_data.read_log(Path(path))}
        for side, path in files.items()
    }
    asked = {
        tuple(f"t{i}" for i in re.findall(r"number (\d+)", t)): plans_of(t)
        for t in sent(server)
        if kinds["extract"] in t
    }
    for batch in stored["batches"]:  # in all pairs of a batch writer 1 is the same
        ours = [pair[batch["model_is"] - 1] for pair in asked.pop(tuple(batch["prompts"]))]
        assert ours == [plans["generations"][i] for i in batch["prompts"]] and len(ours) == 4
    assert not asked and {trait_judging.batches(traits.Args(seed=s), [{}])[0][0] for s in range(9)} == {
        1,
        2,
    }  # and drawn
    compared = {r["id"] for r in rlmt_data.read_log(tmp_path / "run" / "verdicts.jsonl")}
    assert (
        len(compared) == out["n"] == 28
        and not compared & set(stored["prompts"])
        and len(stored["prompts"]) == 12
    )
    count = lambda side, i, word: plans[side][i].count(word)
    for name, word in (("More budget", "budget"), ("More theme", "theme")):
        diff = [count("generations", i, word) - count("baseline", i, word) for i in compared]
        assert out["traits"][name]["win_rate"] == pytest.approx(
            sum(1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in diff) / 28
        )

    again = run(
        serve(counting_judge),
        tmp_path / "again",
        files,
        traits=str(tmp_path / "run" / "traits.json"),
        temperature=0.7,
    )
    assert (
        again["traits"] == out["traits"]
        and {r["id"] for r in rlmt_data.read_log(tmp_path / "again" / "verdicts.jsonl")} == compared
    )
    same = lambda a, b: {k for k in a if a[k] == b[k]}  # each run has a judge at an address of its own
    assert same(again["fingerprint"], out["fingerprint"]) == set(out["fingerprint"]) - {"judge_url", "hash"}


def test_the_prompts_can_be_given_as_files(serve, files, tmp_path, capsys):  # noqa: F811
    """Each by itself, verbatim; braces of the plans stay. Another wording is another fingerprint."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "compare.txt").write_text(
        '<|im_start|>system\nMINE {"T1": x}<|im_end|>\n<|im_start|>user\n'
        "{$conversation}\n{$plans}\n# Traits\n{$traits}<|im_end|>"
    )
    server = serve(counting_judge)
    args = {**files, "extract_pairs": 10}
    own = run(server, tmp_path / "own", args)
    asked = len(server.requests)
    theirs = run(server, tmp_path / "theirs", args, template=str(folder))
    assert theirs["traits"] == own["traits"]  # this judge counts words, whatever it is asked
    assert (own["wording"], theirs["wording"][:5]) == ("our own", "mine ")
    assert own["fingerprint"]["hash"] != theirs["fingerprint"]["hash"]
    prompts = [
        request["messages"] for request, _ in server.requests[asked:] if "MINE" in str(request["messages"])
    ]
    assert len(prompts) == 60
    assert prompts[0][0] == {"role": "system", "content": 'MINE {"T1": x}'}
    assert "for 2}" in prompts[0][1]["content"] and "First of all {this}." in prompts[0][1]["content"]
    said = capsys.readouterr().out
    assert (
        "instructions to extract: our own" in said
        and f"instructions to compare: {folder}/compare.txt" in said
    )

    (folder / "merge.txt").write_text("Merge them.")
    for template, message in (
        (folder, "no {$lists}"),
        (tmp_path, "no folder with extract.txt, merge.txt or"),
    ):
        with pytest.raises(SystemExit) as e:
            run(server, tmp_path / "bad", args, template=str(template))
        assert e.value.code == 2 and message in capsys.readouterr().err
        assert not (tmp_path / "bad").exists()


def test_malformed_replies_are_asked_again_then_left_out(serve, files, tmp_path):  # noqa: F811
    """Prompt i gets malformed reply i to every request with the RL plan first; prompt 39 only the first time it is asked."""
    number = lambda text: int(re.search(r"number (\d+)", text)[1])
    first = lambda text: plans_of(text)[0][0].count("theme") != 1  # the baseline has one theme

    def judge(text, n):
        i = number(text)
        return MALFORMED[i] if first(text) and (i < 35 or (i == 39 and n == 0)) else counting_judge(text)

    server = serve(judge)
    traits = traits_file(tmp_path / "t.json", ("budget", "theme"))  # two, as in MALFORMED
    out = run(server, tmp_path / "run", files, traits=traits, max_invalid=0.5)
    t = out["traits"]
    assert (out["n"], out["n_left_out"], out["n_invalid"], out["n_replies"]) == (5, 35, 35, 80)
    assert t["More budget"]["win_rate"] == 0.1 and (t["More budget"]["ties"], t["More budget"]["losses"]) == (
        2,
        8,
    )  # prompts 35 to 39
    assert len(sent(server)) == 80 + 35 * 3 + 1
    rows = {(r["id"], r["model_is"]): r for r in rlmt_data.read_log(tmp_path / "run" / "verdicts.jsonl")}
    assert all(
        rows[f"t{i}", 1]["choices"] is None and "unreadable in 4 attempts" in rows[f"t{i}", 1]["invalid"]
        for i in range(35)
    )
    assert all(rows[f"t{i}", 2]["choices"] for i in range(40)) and rows["t39", 1]["choices"]
    strict = run(server, tmp_path / "strict", files, traits=traits)
    assert all(v["win_rate"] is None for v in strict["traits"].values())


def test_no_traits_or_no_verdicts_end_the_run(serve, files, tmp_path, capsys):  # noqa: F811
    """Nothing readable at each of the three steps; a refused batch alone is counted."""

    def fails(step: str, reply):
        server = serve(lambda text, n: reply if step in text else counting_judge(text))
        with pytest.raises(SystemExit) as e:
            run(server, tmp_path / step.strip("# "), files, extract_pairs=20)
        assert e.value.code == 2 and not (tmp_path / step.strip("# ") / "summary.json").exists()
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]

    assert "no traits to merge" in fails("How do the two", "They are alike.")[0]
    assert "no traits to merge" in fails("more than one of these", '{"traits": []}')[0]
    assert "merges the traits is invalid" in fails("Several readers", '{"traits": [{"name": "x"}]}')[0]
    assert "no prompt has a readable reply" in fails("# Traits", "same")[0]
    too_long = (400, {"error": {"message": "context too long"}})
    refuses = lambda text, n: (
        too_long if "How do the two" in text and "number 7 " in text else counting_judge(text)
    )
    run(serve(refuses), tmp_path / "refused", files, extract_pairs=39, batch_pairs=13)
    batches = json.loads((tmp_path / "refused" / "traits.json").read_text())["batches"]
    assert {
        b["traits"] is None and "context too long" in b["invalid"]: "t7" in b["prompts"] for b in batches
    } == {True: True, False: False}


def test_resume_after_a_kill(serve, files, tmp_path):  # noqa: F811
    """What kill -9 leaves in the comparison: a run without results, and a torn reply. No stored call is repeated."""
    server = serve(counting_judge)
    args = {**files, "extract_pairs": 10, "concurrency": 2}
    whole = run(server, tmp_path / "run", args)
    assert len(sent(server)) == 2 + 1 + 60 and whole["n"] == 30
    for name in ("summary.json", "verdicts.jsonl"):
        (tmp_path / "run" / name).unlink()
    store = tmp_path / "run" / "judge.jsonl"
    kept = store.read_text().splitlines(keepends=True)[:20]
    store.write_text("".join(kept) + '{"key": "')

    with pytest.raises(SystemExit):  # neither --resume nor --overwrite
        run(server, tmp_path / "run", args)
    assert run(server, tmp_path / "run", args, resume=True) == whole
    assert len(sent(server)) == 63 + 43  # 20 replies stay in the store
    with pytest.raises(SystemExit) as ended:  # finished
        run(server, tmp_path / "run", args, resume=True)
    assert ended.value.code == 0 and json.loads((tmp_path / "run" / "summary.json").read_text()) == whole
    assert len(sent(server)) == 63 + 43  # 20 replies stay in the store


def test_after_an_outage_the_judge_is_asked_again(serve, files, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(endpoint, "MAX_BACKOFF", 0)
    is_down = True

    def judge(text, n):
        if is_down and "# Traits" in text and "number 7 " in text:
            return 503, {"error": {"message": "overloaded"}}
        return counting_judge(text)

    server = serve(judge)
    out = tmp_path / "run"
    args = {**files, "traits": traits_file(tmp_path / "t.json", ("budget",))}
    with pytest.raises(SystemExit):
        run(server, out, args)
    said = capsys.readouterr().err
    assert "2 of 80 got no reply" in said and "--resume" in said and "HTTP 503" in said
    assert not (out / "summary.json").exists()
    is_down = False
    assert run(server, out, args, resume=True)["n_invalid"] == 0
    assert len(list(csv.DictReader(open(tmp_path / "runs.csv")))) == 1
