"""rewards/: names and options, how rewards combine, and hand-worked values of the unsupervised and shaped ones."""

import json
import math
import random
from pathlib import Path

import pytest

import rewards
import train_grpo
import train_ppo
from rewards import gold, shaping, unsupervised, verified
from rewards.shared import fields_of

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


def test_cosine():
    rows = [row(n_tokens=n) for n in (0, 50, 100, 200, 0, 100, 50)]
    values = shaping.cosine(rows, [1, 1, 1, 1, 0, 0, None], 100)
    assert values == near([1.0, 0.75, 0.5, 0.5, -1.0, -0.5, None])


def test_cosine_of_what_the_limit_cut_off():
    """The paper's r_e, and not the best value of a wrong answer."""
    rows = [
        row(n_tokens=100, cut_off=True),
        row(n_tokens=100, cut_off=True),
        row(n_tokens=100, cut_off=False),
    ]
    assert shaping.cosine(rows, [0, 1, 0], 100) == near([-1.0, -1.0, -0.5])
    assert shaping.cosine(rows, [0, None, 0], 100, wrong=(-10.0, 0.0), exceeded=-10.0) == near(
        [-10.0, None, 0.0]
    )


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


# --- 3. names, rules and options


def test_spec():
    assert rewards.parse_spec(
        ["preference:1.0", "math:-0.5", "format:gate", "rubric:veto", "overlong:soft"]
    ) == [("preference", 1.0), ("math", -0.5), ("format", "gate"), ("rubric", "veto"), ("overlong", "soft")]
    assert set(rewards.VERIFIERS) | rewards.UNSUPERVISED < set(rewards.REWARDS)
    assert rewards.parse_spec(
        ["my/own.py:brief", "own.py:kind:0.5", "x.py:a:gate", "x.py:b:veto", "x.py:c:soft"]
    ) == [("brief", 1.0), ("kind", 0.5), ("a", "gate"), ("b", "veto"), ("c", "soft")]
    assert rewards.reward_names(train_grpo.Args(rewards=("my/own.py:brief:1", "math:1"))) == ["brief", "math"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["maths:1"], "no reward 'maths'; there are preference, process, prime, math, code"),
        (["math"], "write math:WEIGHT"),
        (["math:"], "write math:WEIGHT"),
        (["math:high"], "write math:WEIGHT"),
        (["math:nan"], "finite"),
        (["math:inf"], "finite"),
        (["math:1", "math:gate"], "twice"),
        (["format:gate"], "no outcome has a weight"),
        ([], "no outcome has a weight"),
        (["math:0"], "no outcome has a weight"),
        (["math:soft"], "write math:WEIGHT"),
        (["own.py:math:1"], "math is a name of ours"),
        (["own.py:preference"], "is a name of ours"),
        (["own.py:gold:1"], "is a name of ours"),
        (["a.py:brief", "b.py:brief:2"], "twice"),
        (["own.py:brief:high"], "write brief:WEIGHT"),
        (["own.py:brief:gate"], "no outcome has a weight"),
        (["brief:1"], "functions of your own as path/to/file.py:function:WEIGHT"),
        (["my/own.py"], "functions of your own as path/to/file.py"),
        (["combine:1"], "no reward"),
        (["prime:soft", "math:1"], "write prime:WEIGHT"),
        (["prime:gate", "math:1"], "takes a weight only"),
        (["prime:1"], "no outcome has a weight"),
    ],
)
def test_wrong_specs(words, message):
    with pytest.raises(ValueError, match=message):
        rewards.parse_spec(words)


OWN = """
import numpy
from rewards.unsupervised import length

def brief(rows):
    return [-len(row["response"]) for row in rows]

def shorter(rows: list, group_size, correct, max_tokens: int, factor=2.0, **more):
    assert not more
    return [None if c is None else c * factor * v * max_tokens for c, v in zip(correct, length(rows, group_size))]

def polite(rows):
    return ["Q?" in row["messages"][0]["content"] for row in rows]

def told(rows, judge):
    return [reply and reply / 10 for reply in judge]

too_few = lambda rows: [1.0]
texts = lambda rows: ["1"] * len(rows)
a_number = lambda rows: 1.0
none = lambda rows: None
infinite = lambda rows: [1e999] * len(rows)
given = 3
wants = lambda rows, colour: []
no_rows = lambda: []
unclear = lambda rows, limit=None, words=["a"]: [1.0] * len(rows)

def of_numpy(rows, limit: int | None = None):
    return list(numpy.ones(len(rows), dtype="float32") * (limit or 1))
"""


def own_args(folder, *words, **options):
    (folder / "own.py").write_text(OWN)
    asked = {"messages": [{"role": "user", "content": "1 + 2?"}], "answer": "3"}
    (folder / "p.jsonl").write_text(json.dumps({"id": "r"} | asked) + "\n")
    words = tuple(word.replace("own.py", f"{folder}/own.py") for word in words)
    options = {"group_size": 2, "max_completion_tokens": 100} | options
    return train_grpo.Args(prompts=str(folder / "p.jsonl"), rewards=words, **options)


def test_a_reward_of_ones_own(tmp_path, capsys):
    rows = [row("3", n_tokens=10), row("33", n_tokens=20)]
    assert rewards.load(own_args(tmp_path, "own.py:brief"), tmp_path)(rows, 2).totals == [-1, -2]
    args = own_args(tmp_path, "own.py:shorter:0.5", "math:1", "own.py:brief:10", "own.py:polite:gate")
    rewards.check(args)
    scores = rewards.load(args, tmp_path)(rows, 2)
    expected = {"shorter": [100.0, 0.0], "math": [1.0, 0.0], "brief": [-1, -2], "polite": [True, True]}
    assert scores.parts == expected and scores.correct == [1.0, 0.0]
    assert scores.totals == near([50 + 1 - 10, -20]) and scores.contributions["polite"] == [0.0, 0.0]
    said = capsys.readouterr().out
    assert "reward brief: weight 10; applies to 1 of 1 prompts" in said
    messages = {
        "too_few": "1$",
        "texts": "str '1' for row r",
        "a_number": "float 1.0",
        "none": "NoneType None",
    }
    for name, message in messages.items():
        message = f"reward {name} must return a list with a number or None for each of 2 rows, not {message}"
        with pytest.raises(ValueError, match=message):
            rewards.load(own_args(tmp_path, f"own.py:{name}:1"), tmp_path)(rows, 2)
    found = rewards.load(own_args(tmp_path, "own.py:of_numpy", reward_args=("of_numpy.limit=3",)), tmp_path)(
        rows, 2
    )
    assert found.totals == [3.0, 3.0] and json.dumps(found.parts) == '{"of_numpy": [3.0, 3.0]}'
    with pytest.raises(ValueError, match="reward infinite is inf for row r"):
        rewards.load(own_args(tmp_path, "own.py:infinite:1"), tmp_path)(rows, 2)


@pytest.mark.parametrize(
    "word, message",
    [
        ("own.py:given", "given is of type int; it must be a function of rows"),
        ("own.py:wants:2", "wants has a parameter 'colour' without a default. Give it one"),
        ("own.py:no_rows:1", "must take rows as its first parameter (too many positional arguments)"),
        ("own.py:nobody:1", "has no function 'nobody'"),
        ("other.py:brief", "not file.py:function of an existing file"),
        ("own.py:told:1", "told asks a judge; give --judge"),
        ("own.py:shorter", "shorter needs to know what is right"),
    ],
)
def test_an_own_reward_that_cannot_be_had_is_said_first(word, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        rewards.check(own_args(tmp_path, word))
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_a_machine_without_a_sandbox_is_said_first(tmp_path, capsys, no_sandbox):
    prompt = {"id": "a", "messages": [{"role": "user", "content": "Write f."}], "tests": ["assert f(1)"]}
    args = own_args(tmp_path, "code:1")
    Path(args.prompts).write_text(json.dumps(prompt) + "\n")
    with pytest.raises(SystemExit) as e:
        rewards.check(args)
    assert e.value.code == 2 and "apt install bubblewrap" in capsys.readouterr().err


def test_options_from_the_command_line(tmp_path):
    words = ("math:1", "own.py:shorter:1", "cosine:1", "overlong:soft", "code:1", "prime:1")
    set_ = ("math.value=10", "math.no_eos=-10", "shorter.factor=3", "cosine.right=2,1", "overlong.buffer=8")
    set_ += ("code.partial=True", "prime.learning_rate=1e-4")
    options = rewards.reward_options(own_args(tmp_path, *words, reward_args=set_))
    assert options["math"] == {"value": 10.0, "no_eos": -10.0, "seconds": 3.0}
    assert options["shorter"] == {"factor": 3.0} and options["cosine"]["right"] == (2.0, 1.0)
    assert options["code"]["partial"] is True and options["overlong"] == {"buffer": 8}
    assert options["prime"] == {"beta": 0.05, "learning_rate": 1e-4}
    judged_words = ("rubric:1", "pairwise:1", "judge_yes:1", "instructions:1")
    set_ = (
        "rubric.implicit=true",
        "pairwise.opponents=2",
        "judge_yes.question=Is a=b?",
        "instructions.rule=loose",
    )
    options = rewards.reward_options(own_args(tmp_path, *judged_words, reward_args=set_))
    assert options["rubric"]["implicit"] is True and options["pairwise"]["opponents"] == 2
    assert options["judge_yes"]["question"] == "Is a=b?" and options["instructions"]["rule"] == "loose"


@pytest.mark.parametrize(
    "word, message",
    [
        ("maths.value=1", "maths: there is no such reward; --rewards has"),
        ("rubric.saturation=1", "rubric: it is not in --rewards; --rewards has"),
        ("math.values=1", "math has no option 'values'; its options: value, no_eos, seconds"),
        ("math.rows=1", "math has no option 'rows'"),
        ("cosine.max_tokens=9", "cosine has no option 'max_tokens'; its options: right, wrong"),
        ("preference.beta=1", "preference has no option 'beta'; its options: chat_template, max_length"),
        ("math.value", "write NAME.OPTION=VALUE"),
        ("value=1", "write NAME.OPTION=VALUE"),
        ("math.value=ten", "'ten' cannot be read as float; its default is 1.0"),
        ("math.no_eos=nan", "'nan' cannot be read as float"),
        ("math.no_eos=1e999", "'1e999' cannot be read as float"),
        ("math.value=0", "math.value must be above 0"),
        ("code.partial=1", "'1' cannot be read as bool; its default is False"),
        ("code.workers=2.5", "'2.5' cannot be read as int"),
        ("cosine.right=1", "'1' cannot be read as tuple; its default is (1.0, 0.5)"),
        ("cosine.right=1,2,3", "'1,2,3' cannot be read as tuple"),
        ("cosine.right=1,'a'", "cannot be read as tuple"),
        ("instructions.rule=lax", "'lax' is not one of strict, loose"),
        ("unclear.limit=3", "its default is None, so annotate it with a type"),
        ("unclear.words=a", "'a' cannot be read as list"),
    ],
)
def test_wrong_options_are_refused(word, message, tmp_path, capsys):
    words = ("preference:1", "math:1", "code:1", "cosine:1", "instructions:1", "own.py:unclear:1")
    with pytest.raises(SystemExit) as e:
        rewards.check(own_args(tmp_path, *words, reward_args=(word,)))
    assert e.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "word, message",
    [
        ("code.workers=0", "code.workers must be 1 or more, not 0"),
        ("repetition.n=0", "repetition.n must be 1 or more, not 0"),
        ("pairwise.opponents=-1", "pairwise.opponents must be 0 (all others) or more"),
        ("overlong.buffer=101", "overlong.buffer must be from 0 (a quarter of the limit)"),
        ("overlong.buffer=-1", "overlong.buffer must be from 0 (a quarter of the limit)"),
        ("math.no_eos=-10", "math.no_eos=-10 does nothing with --on-bad-format floor"),
        ("cosine.exceeded=-2", "cosine.exceeded=-2 does nothing with --on-bad-format floor"),
    ],
)
def test_options_that_cannot_work_are_said_first(word, message, tmp_path, capsys):
    words = ("math:1", "code:1", "repetition:0.1", "overlong:soft", "pairwise:1", "cosine:1")
    with pytest.raises(SystemExit) as e:
        rewards.check(own_args(tmp_path, *words, reward_args=(word,)))
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_a_reward_for_the_format_needs_completions_that_get_one(tmp_path, capsys):
    for word in ("format:gate", "format:0.2", "format:veto"):
        with pytest.raises(SystemExit):
            rewards.check(own_args(tmp_path, "math:1", word))
        assert "--rewards format does nothing with --on-bad-format floor" in capsys.readouterr().err
        rewards.check(own_args(tmp_path, "math:1", word, on_bad_format="score"))
    rewards.check(own_args(tmp_path, "math:1", "format:0"))  # to see it in the log
    set_ = ("math.no_eos=-10",)
    rewards.check(own_args(tmp_path, "math:1", reward_args=set_, on_bad_format="score"))


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("rubric", {"rubric": [{"criterion": "x", "weight": -1}]}, "row b: the rubric must be a list"),
        ("bleu", {"references": "a text"}, "row b: `references` must be a list of texts"),
        ("bleu", {"references": ["a", 3]}, "row b: `references` must be a list of texts"),
    ],
)
def test_a_row_that_cannot_be_rewarded_is_said_first(name, fields, message, tmp_path, capsys):
    good = {"rubric": [{"criterion": "x", "weight": 1}], "references": {"one": "a", "two": "b"}}
    asked = {"messages": [{"role": "user", "content": "Q"}]}
    prompts = [{"id": "a"} | asked | good, {"id": "b"} | asked | good | fields]
    judge = {"judge": "m", "judge_url": "http://localhost:9/v1"} if name == "rubric" else {}
    args = own_args(tmp_path, f"{name}:1", **judge)
    Path(args.prompts).write_text(json.dumps(prompts[0]) + "\n")
    rewards.check(args)
    Path(args.prompts).write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    with pytest.raises(SystemExit) as e:
        rewards.check(args)
    assert e.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "set_, calls",
    [
        ((), 56),  # 8 x 7, as both rows of a pair share its two games
        (("pairwise.opponents=2",), 32),  # 8 x 2 pairs in two orders
        (("pairwise.opponents=5",), 56),
        (("pairwise.against=reference",), 16),
    ],
)
def test_the_calls_of_games_are_said_first(set_, calls, tmp_path, capsys):
    judge = {"judge": "m", "judge_url": "http://localhost:9/v1", "reward_args": set_, "group_size": 8}
    args = own_args(tmp_path, "pairwise:1", **judge)
    prompt = {"id": "r", "messages": [{"role": "user", "content": "1 + 2?"}], "reference": "3"}
    Path(args.prompts).write_text(json.dumps(prompt) + "\n")
    rewards.check(args)
    assert f"at most {calls} calls a prompt" in capsys.readouterr().out


def test_the_verdict_is_not_the_reward(tmp_path):
    """Whatever a right answer is worth, weighs or shares with others, `correct` is 1; a penalty is 0."""
    set_ = ("math.value=0.25", "math.no_eos=-10", "code.partial=true", "code.value=4")
    args = own_args(tmp_path, "math:-2", "code:3", "cosine:1", reward_args=set_)
    both = {"id": "both", "messages": [{"role": "user", "content": "1 + 2?"}]}
    prompts = [both | {"answer": "3"}, both | {"id": "code", "tests": ["assert f == 1", "assert g == 1"]}]
    prompts.append(both | {"id": "none"})
    Path(args.prompts).write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    rows = [row("3", id="both"), row("4", id="both"), row("3", "truncated", id="both")]
    rows += [row(f"```\nf = 1\n{rest}\n```", id="code", n_tokens=100) for rest in ("g = 1", "")]
    rows.append(row("3", "truncated", id="none"))
    scores = rewards.load(args, tmp_path)(rows, 6)
    assert scores.parts["math"] == [0.25, 0.0, -10.0, None, None, -10.0]
    assert scores.parts["code"] == [None, None, None, 4.0, 2.0, None]
    assert scores.correct == [1.0, 0.0, 0.0, 1.0, 0.0, None]
    assert scores.parts["cosine"][3:] == [0.5, -0.5, None] and scores.totals[5] is None


def test_what_gets_a_floor_is_mixed_into_no_other_total(tmp_path):
    """Two well-formed rows differ by one standard deviation each way, whatever stands beside them."""
    args = own_args(tmp_path, "math:1", "length:0.5", normalise="group")
    rows = [row("3", n_tokens=20), row("4", n_tokens=30), row("3", "nested", n_tokens=2)]
    h = math.sqrt(0.5)
    scores = rewards.load(args, tmp_path)(rows, 3)
    assert scores.totals[:2] == near([1.5 * h, -1.5 * h]) and scores.totals[2] is None
    assert scores.correct == [1.0, 0.0, 0.0] and scores.parts["math"] == [1.0, 0.0, 1.0]
    scored = own_args(tmp_path, "math:1", "length:0.5", on_bad_format="score")
    # lengths 20, 30, 2: 0.5 - 18/28, 0.5 - 1, 0.5
    expected = [1 + 0.5 * (0.5 - 18 / 28), -0.25, 1.25]
    assert rewards.load(scored, tmp_path)(rows, 3).totals == near(expected)


def test_pass_at_k_needs_a_verifier(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        rewards.check(own_args(tmp_path, "preference:1", pass_at_k=1, reward_model="data/toy/reward_model"))
    assert e.value.code == 2 and "--pass-at-k needs to know what is right" in capsys.readouterr().err


# --- 4. several become one


def combine(parts, words, rows=None, group_size=0, **options):
    """The totals, once contributions add up to them."""
    rows = rows or [row() for _ in next(iter(parts.values()))]
    totals, contributions = rewards.combine(
        parts, rewards.parse_spec(words), rows, group_size or len(rows), **options
    )
    assert contributions.keys() == parts.keys()
    for i, total in enumerate(totals):
        column = [values[i] for values in contributions.values()]
        assert total is None or abs(total - sum(column)) <= 1e-9
    return totals


def test_weighted_sum():
    parts = {"preference": [1.0, 2.0, None], "judge_mark": [0.5, None, 1.0]}
    assert combine(parts, ["preference:1", "judge_mark:2"]) == [2.0, None, None]


def test_normalised_before_it_is_weighted():
    parts = {"preference": [1.0, 3.0, 10.0, 30.0], "format": [1.0, 1.0, 0.0, 1.0]}
    h = math.sqrt(0.5)  # of two values, +-1 / sqrt(2) with n - 1
    assert combine(parts, ["preference:1", "format:0.5"], group_size=2, normalise="group") == near(
        [-h, h, -1.5 * h, 1.5 * h]
    )
    # mean 11, squares 100 + 64 + 1 + 361 = 526, / 3; format: mean 0.75, squares 3/16 + 9/16 = 0.75, / 3 = 0.25
    std = math.sqrt(526 / 3)
    expected = [-10 / std + 0.25, -8 / std + 0.25, -1 / std - 0.75, 19 / std + 0.25]
    assert combine(parts, ["preference:1", "format:0.5"], group_size=2, normalise="batch") == near(expected)
    assert combine({"preference": [0.1, 0.1, 0.1]}, ["preference:1"], normalise="group") == [0, 0, 0]
    assert combine({"preference": [5.0, None, 7.0]}, ["preference:1"], normalise="group") == near(
        [-h, None, h]
    )


def test_gate():
    parts = {"preference": [-5.0, -7.0, None, 3.0, 9.0, None], "format": [1.0, 1.0, 0.0, 0.5, 0.0, 0.0]}
    totals = combine(parts, ["preference:1", "format:gate"], group_size=3)
    assert totals == near([-5, -7, -8, -1, -1, -1])  # below its group's lowest; nobody passes: all the same
    assert combine(parts, ["preference:1", "format:gate"], group_size=3, margin=2.5)[2] == -9.5
    assert combine({"preference": [1.0, 2.0], "format": [None, 1.0]}, ["preference:1", "format:gate"]) == [
        None,
        2.0,
    ]
    parts = {"preference": [1.0, 2.0], "format": [0.0, 1.0], "judge_yes": [0.0, 1.0]}
    assert combine(parts, ["preference:1", "format:gate", "judge_yes:gate"]) == [1.0, 2.0]


def test_veto():
    parts = {"preference": [4.0, -4.0, 4.0, 4.0], "judge_mark": [0.0, 0.0, 0.2, None]}
    assert combine(parts, ["preference:0.5", "judge_mark:veto"]) == [0.0, -2.0, 2.0, None]


def test_soft_penalty_keeps_its_scale_and_gated_rows_stay_below():
    parts = {"preference": [1.0, 3.0, 2.0], "overlong": [-1.0, 0.0, -0.5], "format": [1.0, 1.0, 0.0]}
    h = math.sqrt(0.5)
    totals = combine(parts, ["preference:1", "overlong:soft", "format:gate"], normalise="group")
    assert totals == near([-1 - 1, 1, -3.0]) and h  # (1, 3, 2): mean 2, std 1
    assert combine(parts, ["overlong:soft", "preference:2", "format:0"]) == near([1.0, 6.0, 3.5])


def test_a_part_whose_field_the_prompt_lacks_does_not_apply():
    rows = [row(answer="1"), row(answer="1"), row(), row()]
    parts = {"math": [1.0, None, None, None], "preference": [0.5, 0.5, 0.5, None]}
    assert combine(parts, ["math:1", "preference:1"], rows, 2) == [1.5, None, 0.5, None]
    assert combine({"math": [1.0, 0.0, None, None]}, ["math:1"], rows, 2) == [1.0, 0.0, None, None]
    parts = {"preference": [1.0] * 4, "math": [0.0, 1.0, None, None]}
    assert combine(parts, ["preference:1", "math:gate"], rows, 2) == [0.0, 1.0, 1.0, 1.0]
    assert combine(parts, ["preference:1", "math:veto"], rows, 2) == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("absent", [None, "", [], {}])
def test_an_empty_field_is_a_field_that_is_missing(absent):
    """A parquet table has every column in every row."""
    rows = [row(answer="1", instruction_id_list=absent), row(answer=0, instruction_id_list=absent)]
    parts = {"math": [1.0, 0.0], "instructions": [None, None]}
    assert combine(parts, ["math:1", "instructions:1"], rows, 2) == [1.0, 0.0]
    rows = [row(answer=absent, references=["a"]), row(answer="1", references=absent)]
    parts = {"math": [None, 1.0], "bleu": [0.5, None]}
    assert combine(parts, ["math:1", "bleu:1"], rows, 2) == [0.5, 1.0]
    assert verified.math_answer(rows) == [None, 0.0]


def test_a_game_against_a_reference_needs_one():
    rows = [row(reference="a"), row(reference="")]
    parts = {"preference": [1.0, 2.0], "pairwise": [0.5, None]}
    fields = fields_of({"preference": {}, "pairwise": {"against": "reference"}})
    assert combine(parts, ["preference:1", "pairwise:1"], rows, 2, fields=fields) == [1.5, 2.0]
    fields = fields_of({"preference": {}, "pairwise": {"against": "group"}})
    assert combine(parts, ["preference:1", "pairwise:1"], rows, 2, fields=fields) == [1.5, None]


def test_ppo_plays_against_references_but_not_against_a_group(tmp_path, capsys):
    prompt = {"id": "r", "messages": [{"role": "user", "content": "1 + 2?"}], "reference": "3"}
    (tmp_path / "p.jsonl").write_text(json.dumps(prompt) + "\n")
    judge = {"judge": "m", "judge_url": "http://localhost:9/v1", "prompts": str(tmp_path / "p.jsonl")}
    args = train_ppo.Args(rewards=("pairwise:1",), reward_args=("pairwise.against=reference",), **judge)
    rewards.check(args)
    assert "applies to 1 of 1 prompts" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        rewards.check(train_ppo.Args(rewards=("pairwise:1",), **judge))
    assert "--rewards pairwise compares the completions of one prompt" in capsys.readouterr().err


def test_contributions_always_add_up():
    draw, words = (
        random.Random(0),
        ["preference:1.7", "judge_mark:-0.3", "judge_yes:veto", "overlong:soft", "format:gate", "math:0.1"],
    )
    for normalise in ("none", "group", "batch"):
        value = lambda: draw.choice([None, 0.0, 1.0, draw.gauss(0, 1e3), draw.gauss(0, 1)])
        rows = [row(answer="1") if draw.random() < 0.8 else row() for _ in range(400)]
        parts = {word.partition(":")[0]: [value() for _ in rows] for word in words}
        totals = combine(parts, words, rows, 8, normalise=normalise)
        assert 20 < sum(t is not None for t in totals) < 400
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="reward preference is (nan|inf) for row r"):
            combine({"preference": [1.0, wrong]}, ["preference:1"])
    with pytest.raises(ValueError, match="argument 2"):
        combine({"preference": [1.0]}, ["preference:1"], [row(), row()])
    with pytest.raises(ValueError, match="3 rows"):
        combine({"preference": [1.0] * 3}, ["preference:1"], group_size=2)


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
