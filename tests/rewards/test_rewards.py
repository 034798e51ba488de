"""rewards/: names and options, how rewards combine, and hand-worked values of the unsupervised and shaped ones."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import rewards
import train_grpo
import train_ppo
from rewards import gold, shaping, unsupervised
from rewards.shared import has_field


DATA = Path(__file__).parents[2].parent / "shared" / "data"


def row(response="", status="ok", n_tokens=10, **fields):
    return {
        "id": "r",
        "messages": [{"role": "user", "content": "Q?"}],
        "text": response,
        "thinking": "",
        "response": response,
        "status": status,
        "n_tokens": n_tokens,
        "n_thinking_tokens": 0,
    } | fields


def shared(name):
    if not (DATA / name).exists():
        pytest.skip(f"no {DATA / name}")
    return DATA / name


def near(values):
    return pytest.approx(values, abs=1e-12)


# --- 1. unsupervised


def test_majority():
    groups = [
        ["\\boxed{1,000}", "so 1000.", "7", "none"],
        ["3", "4", "4", "3"],
        ["a", "b", "c", "d"],
        ["\\boxed{1/2}", "\\boxed{0.5}", "\\boxed{\\frac12}", "2"],
        ["\\boxed{20\\%}", "about 20%", "3", "3"],
    ]
    values = unsupervised.majority([row(t) for group in groups for t in group], 4)
    assert values == [
        1,
        1,
        0,
        0,
        1,
        0,
        0,
        1,
        *[None] * 4,
        1,
        1,
        1,
        0,
        1,
        1,
        0,
        0,
    ]  # 3 and 4 tie: 3 stands first


def test_statistics_of_the_trainer():
    rows = [row(mean_entropy=0.5, mean_kl_uniform=2.0), row()]
    assert unsupervised.negative_entropy(rows) == [-0.5, None]
    assert unsupervised.self_certainty(rows) == [2.0, None]


def test_heuristics():
    assert unsupervised.good_format([row(), row(status="nested"), row(status="truncated")]) == [1, 0, 0]
    lengths = [row(n_tokens=n) for n in (10, 20, 30, 5, 5, 5)]
    assert unsupervised.length(lengths, 3) == [0.5, 0.0, -0.5, 0, 0, 0]
    assert unsupervised.length([row(n_tokens=7)], 1) == [0.0]
    # a b a b a: ab, ba, ab, ba: 2 of 4 are repeats; trigrams aba, bab, aba: 1 of 3
    assert unsupervised.repetition([row("a b A b a"), row("a b c"), row("a"), row("")], 2) == [-0.5, 0, 0, 0]
    assert unsupervised.repetition([row("a b a b a")]) == near([-1 / 3])


def test_a_row_that_gets_a_floor_is_no_measure_of_the_others():
    bad = {"status": "nested", "gets_floor": True}
    lengths = [row(n_tokens=n) for n in (400, 500, 600)] + [row(n_tokens=2, **bad)]
    assert unsupervised.length(lengths, 4) == [0.5, 0.0, -0.5, None]
    assert unsupervised.length([row(n_tokens=2, **bad), row(n_tokens=9)], 2) == [None, 0.0]
    assert unsupervised.length([row(**bad), row(**bad)], 2) == [None, None]
    # 4, 4 and 3 against 3 by the well-formed ones
    assert unsupervised.majority([row("3"), row("4", **bad), row("4", **bad)], 3) == [1, 0, 0]
    assert unsupervised.majority([row("3", **bad), row("none"), row("4", **bad)], 3) == [None] * 3


def test_collapse():
    rows = [row("1"), row("1"), row("1", mean_entropy=0.2), row("x", mean_entropy=0.4), *[row("5")] * 4]
    assert unsupervised.collapse_indicators(rows, 4) == near(
        {
            "agreement": (3 / 4 + 1) / 2,
            "distinct_answers": 1.0,
            "distinct_responses": (2 / 4 + 1 / 4) / 2,
            "no_answer": 1 / 8,
            "entropy": 0.3,
        }
    )
    assert unsupervised.collapse_indicators([row("a"), row("b")], 2) == {
        "agreement": 0,
        "distinct_answers": 0,
        "distinct_responses": 1,
        "no_answer": 1,
    }


def test_answers_to_different_prompts_need_not_differ():
    """PPO has one completion of each prompt."""
    rows = [row("5", id="a", mean_entropy=1.0), row("5", id="b", mean_entropy=1.0)]
    found = unsupervised.collapse_indicators(rows, 2)
    assert found == {"distinct_responses": 0.5, "no_answer": 0, "entropy": 1.0}
    assert unsupervised.collapsed([found] * 10) == ""
    assert "entropy" in unsupervised.collapsed([found | {"entropy": 0.01}] * 10)


def test_stop_rule():
    step = lambda agreement, entropy=None: {"agreement": agreement, "entropy": entropy}
    assert unsupervised.collapsed([]) == "" and unsupervised.collapsed([step(1.0)] * 9) == ""
    assert "agreement of 0.99" in unsupervised.collapsed([step(0.2)] + [step(1.0)] * 10)
    assert unsupervised.collapsed([step(1.0)] * 9 + [step(0.98)]) == ""
    assert "entropy" in unsupervised.collapsed([step(0.5, 0.01)] * 3, steps=3)
    assert unsupervised.collapsed([step(0.5, 0.01), step(0.5), step(0.5, 0.01)], steps=3) == ""

    # a majority vote measures no entropy
    without_entropy = unsupervised.collapse_indicators([row("1"), row("2"), row("1"), row("1")], 4)
    assert unsupervised.collapsed([without_entropy] * 10) == ""


# --- 2. shaped


def test_overlong():
    assert shaping.overlong([row(n_tokens=n) for n in (0, 80, 85, 90, 100, 120)], 100, 20) == near(
        [0, 0, -0.25, -0.5, -1, -1]
    )


def test_pass_at_k():
    # n 4, c 1, k 2: rho = 1 - C(3,2)/C(4,2) = 0.5, sigma 0.5; right 1, wrong (0.5 - C(2,1)/C(3,1)) / 0.5 = -1/3
    assert shaping.pass_at_k([1, 0, 0, 0], 4, 2) == near([1, -1 / 3, -1 / 3, -1 / 3])
    # k 1 is the binary z-score: p = 1/4, sigma = sqrt(3)/4: 3/sqrt(3), -1/sqrt(3)
    assert shaping.pass_at_k([0, 1, 0, 0], 4, 1) == near([-1 / 3**0.5, 3**0.5, -1 / 3**0.5, -1 / 3**0.5])
    assert shaping.pass_at_k([1, 1, 1, 0, 0, 0, 0, 0], 4, 2) == [0] * 8  # any two hold a right one; none does
    assert shaping.pass_at_k([1, 0, None, 0], 4, 1) == near([2**0.5, -(0.5**0.5), None, -(0.5**0.5)])
    assert shaping.pass_at_k([1, None, None, None], 4, 2) == [0, None, None, None]
    for group in ([1, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0]):
        assert sum(shaping.pass_at_k(group, 6, 3)) == pytest.approx(0)
    with pytest.raises(ValueError, match="k from 1 to the group size 2"):
        shaping.pass_at_k([1, 0], 2, 3)


# --- 3. names, weights and options


def parts_of(*words: str, options: tuple = (), **more) -> list:
    return rewards.read_parts(train_grpo.Args(rewards=words, reward_args=options, **more))


OWN = """
def brief(rows, per_token=-1.0, limit: int | None = None):
    return [per_token * min(row["n_tokens"], limit or 99) for row in rows]

def reads_the_prompt(rows, group_size, max_tokens):
    return [row["answer"] * group_size + max_tokens for row in rows]

def short(rows):
    return [1.0]

def infinite(rows):
    return [float("inf")] * len(rows)

def needs_more(rows, temperature):
    return [0.0] * len(rows)

preference = brief
"""


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_words_are_names_weights_and_gates(own):
    found = parts_of(
        "math:2", "format:gate", f"{own}:brief", "pairwise:1", options=("pairwise.against=reference",)
    )
    shown = [(part.name, part.weight, part.is_gate, part.field) for part in found]
    assert shown == [
        ("math", 2.0, False, "answer"),
        ("format", 0.0, True, ""),
        ("brief", 1.0, False, ""),
        ("pairwise", 1.0, False, "reference"),  # only against a reference does it need one
    ]
    options = ("brief.limit=3", "brief.per_token=-0.5", "math.value=10", "code.partial=true")
    brief, math_part, code = parts_of(f"{own}:brief", "math:1", "code:1", options=options)
    assert brief.options == {"per_token": -0.5, "limit": 3} and math_part.options["value"] == 10.0
    assert code.options["partial"] is True
    assert rewards.call(brief, [row(n_tokens=n) for n in (1, 9)], {}) == [-0.5, -1.5]
    [part] = parts_of(f"{own}:reads_the_prompt:1")
    assert rewards.call(part, [row(answer=3)], {"group_size": 2, "max_tokens": 100, "judge": None}) == [106.0]
    for file_and_function in filter(None, rewards.REWARDS.values()):  # every name is there
        file, _, function = file_and_function.partition(".")
        assert callable(getattr(importlib.import_module(f"rewards.{file}"), function))


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["maths:1"], [], "there is no reward 'maths'"),
        (["math"], [], "write math:WEIGHT"),
        (["math:nan"], [], "write math:WEIGHT"),
        (["math:1", "math:2"], [], "math is named twice"),
        (["math:0", "format:gate"], [], "no outcome has a weight"),
        (["OWN:preference:1"], [], "preference is a name of ours"),
        (["OWN:absent:1"], [], "has no function 'absent'"),
        (["OWN:needs_more:1"], [], "'temperature' without a default"),
        (["math:1"], ["math.value"], "write NAME.OPTION=VALUE"),
        (["math:1"], ["code.partial=true"], "code is not in --rewards"),
        (["math:1"], ["math.rows=1"], "math has no option 'rows'"),
        (["math:1"], ["math.value=ten"], "'ten' cannot be read as float"),
        (["pairwise:1"], ["pairwise.against=all"], "'all' is not one of group, reference"),
        (["OWN:brief:1"], ["brief.limit=2.5"], "'2.5' cannot be read as int"),
    ],
)
def test_wrong_words_are_one_clear_error(words, options, message, own, exits):
    words = [word.replace("OWN", own) for word in words]
    assert message in exits(parts_of, *words, options=tuple(options))


def test_what_a_reward_returns_is_checked(own):
    for name in ("short", "infinite"):
        [part] = parts_of(f"{own}:{name}:1")
        with pytest.raises(
            ValueError, match=f"reward {name} must return a list with a finite number or None"
        ):
            rewards.call(part, [row(), row()], {})


PROMPTS = [
    {"id": "a", "messages": [{"role": "user", "content": "1 + 2?"}], "answer": "3", "rubric": None},
    {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "answer": ""},
]


def check(*words: str, prompts=PROMPTS, **more) -> None:
    args = train_grpo.Args(rewards=words, **more)
    rewards.check(args, prompts, SimpleNamespace(print=print))


def test_a_run_says_to_how_many_prompts_a_reward_applies(capsys, exits):
    check("math:1", "length:0.1")
    said = capsys.readouterr().out
    assert "reward math: weight 1" in said and "applies to 1 of 2 prompts" in said  # an empty field is none
    judge = {"judge": "m", "judge_url": "http://localhost:9/v1"}
    assert "no row of data/wildchat_if.jsonl has the field 'rubric'" in exits(check, "rubric:1", **judge)
    wrong = [PROMPTS[0] | {"rubric": [{"criterion": "a", "weight": -1}], "references": 7}]
    assert "row a: the rubric must be a list" in exits(check, "rubric:1", prompts=wrong, **judge)
    assert "row a: `references` must be" in exits(check, "bleu:1", prompts=wrong)
    assert "--rewards judge_mark asks a judge" in exits(check, "judge_mark:1")
    assert "--pass-at-k needs to know what is right" in exits(check, "length:1", pass_at_k=2)
    assert "--pass-at-k 16 must be at most --group-size 8" in exits(check, "math:1", pass_at_k=16)
    assert "--rewards prime learns from what is right" in exits(check, "length:1", "prime:1")
    assert "--beta 0 leaves out" in exits(check, "math:1", "prime:1", beta=0.0)
    assert "add --on-bad-format score" in exits(check, "math:1", "format:0.1")
    check("math:1", "format:0.1", on_bad_format="score")
    args = train_ppo.Args(rewards=("majority:1",))
    assert "PPO has one of each" in exits(rewards.check, args, PROMPTS, SimpleNamespace(print=print))


# --- 4. several become one


def combine(values: dict, words: list, rows=None, group_size=0, margin=1.0, floors=()) -> list:
    """The totals, once contributions add up to them."""
    rows = rows or [row() for _ in next(iter(values.values()))]
    parts = parts_of(*words)
    scored = []
    for i, one in enumerate(rows):
        of_row = {name: column[i] for name, column in values.items()}
        applies = {part.name: not part.field or has_field(one, part.field) for part in parts}
        scored.append(rewards.Scored(of_row, applies, i in floors))
    totals, contributions = rewards.combine(scored, parts, group_size or len(rows), margin)
    for i, (total, added) in enumerate(zip(totals, contributions, strict=True)):
        assert added.keys() == values.keys()
        if total is not None and i not in floors:
            assert total == pytest.approx(sum(added.values()), abs=1e-9)
    return totals


def test_a_weighted_sum_is_known_where_all_its_parts_are():
    values = {"preference": [1.0, 2.0, None], "repetition": [0.5, None, 1.0]}
    assert combine(values, ["preference:1", "repetition:2"]) == [2.0, None, None]
    rows = [row(answer="1"), row(answer="1"), row(), row(answer="")]
    values = {"math": [1.0, None, None, None], "preference": [0.5, 0.5, 0.5, None]}
    assert combine(values, ["math:1", "preference:1"], rows, 2) == [1.5, None, 0.5, None]
    assert combine({"math": [1.0, 0.0, None, None]}, ["math:1"], rows, 2) == [1.0, 0.0, None, None]
    with pytest.raises(ValueError, match="3 rows"):
        combine({"preference": [1.0] * 3}, ["preference:1"], group_size=2)


def test_a_gate_puts_those_that_fail_below_their_group():
    words = ["preference:1", "format:gate"]
    values = {"preference": [-5.0, -7.0, None, 3.0, 9.0, None], "format": [1.0, 1.0, 0.0, 0.5, 0.0, 0.0]}
    assert combine(values, words, group_size=3) == near(
        [-5, -7, -8, -1, -1, -1]
    )  # nobody passes: all the same
    assert combine(values, words, group_size=3, margin=2.5)[2] == -9.5
    assert combine({"preference": [1.0, 2.0], "format": [None, 1.0]}, words) == [None, 2.0]
    rows = [row(answer="1"), row(answer="1"), row(), row()]
    values = {"preference": [1.0] * 4, "math": [0.0, 1.0, None, None]}
    assert combine(values, ["preference:1", "math:gate"], rows, 2) == [0.0, 1.0, 1.0, 1.0]


def test_a_floor_is_below_all_others_of_its_group():
    values = {"preference": [1.0, None, 3.0, -2.0, None, None, 7.0, None]}
    totals = combine(values, ["preference:1"], group_size=4, margin=0.5, floors=(1, 4, 5, 6))
    assert totals == [1.0, -2.5, 3.0, -2.0, -0.5, -0.5, -0.5, None]  # of the second group nothing is known
    # what gets a floor is no lowest of those that fail a gate, which in turn are no lowest of its own
    values = {"preference": [1.0, -9.0, 5.0], "format": [1.0, 0.0, 0.0]}
    totals = combine(values, ["preference:1", "format:gate"], floors=(1,))
    assert totals == [1.0, -1.0, 0.0]


def test_the_verdict_is_not_the_reward():
    parts = parts_of("math:2", "factual:1", options=("math.value=10",))
    right = row(answer="1", gets_floor=False)
    assert rewards.verdict(right, {"math": 10.0, "factual": None}, parts) == 1.0
    assert rewards.verdict(right, {"math": 4.0, "factual": 1.0}, parts) == 0.0
    assert rewards.verdict(right | {"gets_floor": True}, {"math": None, "factual": None}, parts) == 0.0
    assert rewards.verdict(row(reference="a", gets_floor=False), {"math": None, "factual": 1.0}, parts) == 1.0
    assert rewards.verdict(row(gets_floor=False), {"math": None, "factual": None}, parts) is None


# --- 5. gold on held-out prompts


def held_out_rows(golds: list, proxy: float) -> list[dict]:
    rows = []
    for number, value in enumerate(golds):
        rewards = {"gold": value, "preference": proxy}
        rows.append({"id": number, "status": "ok", "n_tokens": 5, "n_thinking_tokens": 2, "rewards": rewards})
    return rows


def test_held_out_gold_is_compared_prompt_by_prompt(tmp_path, capsys):
    """Easy and hard prompts (standard error 0.18 at both steps), all 0.1 lower at the second: a fall of 0.1 for certain.

    The third differs from the first by 0.1 on average too, but by -0.5 to 0.3: standard error 0.14, so no warning."""
    easy_and_hard = [0.9, 0.9, 0.9, 0.1, 0.1, 0.1]
    all_lower = [0.8, 0.8, 0.8, 0.0, 0.0, 0.0]
    noise = [0.4, 0.4, 0.9, 0.0, 0.4, 0.3]
    for step, (golds, proxy) in enumerate([(easy_and_hard, 1.0), (all_lower, 1.5), (noise, 2.0)], 1):
        gold.log_held_out(tmp_path, step, held_out_rows(golds, proxy))
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(warned) == 1 and "step 2" in warned[0]


def test_held_out_gold_beside_the_proxy_is_of_the_same_completions(tmp_path, capsys):
    """A policy that learns to come to an end: its cut-off completions had the higher gold, its good ones are as before."""
    start = held_out_rows([1.0, 1.0, 0.2, 0.4], 1.0)
    start[0]["status"] = start[1]["status"] = "truncated"
    assert gold.log_held_out(tmp_path, 0, start)
    assert gold.log_held_out(
        tmp_path, 5, held_out_rows([0.3, 0.3, 0.2, 0.4], 1.5)
    )  # the best checkpoint, below the start
    lines = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert [line["gold"] for line in lines] == pytest.approx([0.65, 0.3])
    assert [line["gold_ok"] for line in lines] == pytest.approx([0.3, 0.3])
    assert [line["gold_ok_se"] for line in lines] == pytest.approx([0.1, 0.1 / 6**0.5])
    assert "WARNING" not in capsys.readouterr().out


def test_held_out_gold_without_every_mark(tmp_path, capsys):
    """Means over what is there; the best step is kept, and the proxy that rises while gold falls is named."""
    steps = [
        ([0.5, 0.6, None, 0.7], 1.0),
        ([0.9, 0.9, 0.8, 0.9], 1.5),
        ([0.3, 0.2, 0.3, 0.2], 2.0),
        ([None] * 4, 2.5),
        ([0.91] * 4, 1.4),
    ]
    better = [
        gold.log_held_out(tmp_path, i, held_out_rows(golds, proxy))
        for i, (golds, proxy) in enumerate(steps, 1)
    ]
    assert better == [True, True, False, False, True]
    lines = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert [line["n_gold"] for line in lines] == [3, 4, 4, 0, 4] and lines[3]["gold"] is None
    assert lines[0]["gold"] == pytest.approx(0.6) and lines[0]["gold_se"] == pytest.approx(0.1 / 3**0.5)
    assert lines[0]["response_tokens"] == 3 and lines[0]["think_tokens"] == 2
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(warned) == 1 and "step 3" in warned[0] and "since step 2, where gold was best" in warned[0]
