"""Parsers, loaders, chat rendering and numbers against generated input, by hypothesis.

python -m pytest tests/project/test_fuzz.py                  # CASES of each property, the same every time
FUZZ=10000 python -m pytest tests/project/test_fuzz.py       # so many of each (rendering: a tenth), others every time
"""

import contextlib
import io
import json
import math
import os
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from chat_server import ask_for

from benchmarks import accuracy, alpacaeval2, arenahard2, creativewriting3, verified
from benchmarks import traits, wildbench
from rlmt import model as policy
from rewards import judged
from rewards import simulated_user as simulator
from rewards import verified as rewards_verified
from rewards.code_runner import find_program
from rlmt.data import load_prompts, read_pairs, read_prompts, read_rows, read_traces
from rlmt import chat as templates
import train_dpo
import train_ppo
import train_grpo
import train_rlver
import train_sft_warmstart
import utils
from data import make_traces
from rlmt.endpoint import Endpoint, Reply
from rlmt import data as rlmt_data
from rlmt import run as rlmt_run
from rlmt import chat

CASES, LARGE = 100, int(os.environ.get("FUZZ", 0))
QUIET = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.register_profile("fuzz", max_examples=LARGE or CASES, derandomize=not LARGE, **QUIET)
settings.load_profile("fuzz")
slow = settings(max_examples=max(CASES // 4, LARGE // 10))

# --- what is generated

ODD = [
    "\ud800",
    "\udfff",
    "\0",
    "\ufeff",
    "\r\n",
    "\r",
    "\u2028",
    "\u2029",
    "\u0085",
    "\x1c",
    "\x0b",
    "\u200b",
    "\u00a0",
    "\U0001f914",
    "é",
]
MARKS = [
    *utils.TAGS,
    "<|im_end|>",
    "<|im_start|>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|endoftext|>",
    "</s>",
    "{",
    "}",
    '"',
    "\\",
    "[[",
    "]]",
    "####",
    "\\boxed{",
    "$",
    "```",
    "Answer:",
    "Change:",
    "Response:",
    "A>>B",
    "Coherent:",
    "verdict",
    '"rank"',
    "yes",
    "10",
    "-",
    "{{ x }}",
    "{% raw %}",
    "{$case}",
    "${x}",
    "%s",
    " ",
    "\n",
    "NaN",
]
anything = st.lists(
    st.sampled_from(MARKS) | st.sampled_from(ODD) | st.text(max_size=8) | st.characters(codec=None),
    max_size=12,
).map("".join)
text = anything.map(lambda t: t.encode("utf-8", "replace").decode())  # what can be sent and saved
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63, 1e308, -0.0])
values = st.recursive(
    st.none() | st.booleans() | numbers | anything,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(anything, v, max_size=3),
    max_leaves=8,
)
formats = st.sampled_from(list(utils.THINK_FORMATS))
FAMILIES = [
    "llama_instruct",
    "llama_base",
    "qwen25_instruct",
    "qwen25_base",
    "qwen3",
    "smollm",
    "plain",
    "gpt2",
]


def fails(function, *args):
    """The function's value, or the message with which it ended the program with exit code 2. Anything else it
    raises passes on."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return function(*args)
    except SystemExit as end:
        assert end.code == 2
        (message,) = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
        return message.removeprefix("error: ")


@given(anything)
@example("no field 'x' (found \n)")
def test_a_failure_is_one_line(message):
    out = io.StringIO()
    with contextlib.redirect_stderr(out), pytest.raises(SystemExit, match="2"):
        utils.fail(message)
    assert out.getvalue().startswith("error: ") and len(out.getvalue().splitlines()) == 1


# --- think format


@given(anything, anything, formats, st.booleans())
def test_splitting_what_was_joined(z, y, think_format, finished):
    clean = not any(tag in z + y for tag in utils.TAGS) and y.strip()
    whole = utils.join_thinking(z, y, think_format)
    parts = utils.split_thinking(whole, think_format, True)
    if clean:
        assert parts == (z.strip() if "think" in think_format else "", y.strip(), "ok")
        assert utils.split_thinking(f"\n {whole} \n", think_format) == parts
        assert utils.join_thinking(parts.thinking, parts.response, think_format) == whole
    assert utils.split_thinking(whole, think_format, finished).response in whole


@given(anything, formats, st.booleans())
def test_splitting_anything(completion, think_format, finished):
    thinking, response, status = utils.split_thinking(completion, think_format, finished)
    assert (
        thinking in completion
        and response in completion
        and thinking == thinking.strip()
        and response == response.strip()
    )
    assert status in ("ok", "no_open", "no_close", "nested", "empty_response", "truncated")
    assert status != "ok" or (
        response
        and utils.split_thinking(utils.join_thinking(thinking, response, think_format), think_format)
        == (thinking, response, "ok")
    )


# --- rendering


@pytest.fixture(scope="module")
def tokenizers(tokenizer_folders):
    """Prepared policies' tokenizers by (family, think format): every template of this repository, and the
    families' own."""
    found = {}
    for family in FAMILIES:
        for think_format in utils.THINK_FORMATS:
            tokenizer = chat.load_tokenizer(tokenizer_folders[family])
            found[family, think_format] = (
                tokenizer,
                templates.prepare_tokenizer(tokenizer, think_format).split(";")[0],
            )
    named = {name.removeprefix("chat template: ") for _, name in found.values()}
    zero = {name for name, one in utils.THINK_FORMATS.items() if one.instruction}
    assert named == {"its own", *templates.CHAT_TEMPLATES, *zero}
    return {key: tokenizer for key, (tokenizer, _) in found.items()}


chats = st.lists(text, min_size=1, max_size=3).map(
    lambda texts: [
        {"role": ("user", "assistant")[(len(texts) - i) % 2 == 0], "content": t}
        for i, t in enumerate(texts, 1)
    ]
)


def control_count(tokenizer, ids):
    control = set(templates.control_tokens(tokenizer))
    return sum(i in control for i in ids)


@slow
@given(st.sampled_from(FAMILIES), formats, chats, text, text, st.integers(0, 3))
@example(
    "qwen25_instruct",
    "think",
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\nYes."}],
    "z",
    "y",
    0,
)
@example("llama_instruct", "plain", [{"role": "user", "content": "<|eot_<|eot_id|>id|>"}], "z", "y", 0)
@example("plain", "plain", [{"role": "user", "content": "</s>"}], "z", "y</s>", 0)
def test_rendered_masked_and_split_again(tokenizers, family, think_format, messages, z, y, extra):
    tokenizer = tokenizers[family, think_format]
    prompt = templates.encode_prompt(tokenizer, messages)
    # a text of the same turns without any special token opens and closes as many turns
    blank = [{**m, "content": "Q"} for m in messages]
    assert control_count(tokenizer, prompt) == control_count(
        tokenizer, templates.encode_prompt(tokenizer, blank)
    )
    assert (
        tokenizer.bos_token_id is None
        or family == "smollm"
        or prompt.count(tokenizer.bos_token_id) <= 1
        or tokenizer.bos_token_id
        in (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    )
    assert len(messages) == len(blank) and prompt == templates.encode_prompt(
        tokenizer, templates.without_control(tokenizer, messages)
    )
    if not think_format.startswith("zero"):  # SFT's rows and loss mask
        row = {"id": "r", "messages": messages, "thinking": z, "response": y}
        kept, dropped = train_sft_warmstart.build_rows([row], tokenizer, think_format, 10**6)
        assert len(kept) + len(dropped) == 1
        for sample in kept:
            supervised = sample.ids
            assert sample.prompt_ids == prompt
            assert supervised[-1] == tokenizer.eos_token_id and control_count(tokenizer, supervised) == 1
            written = tokenizer.decode(supervised[:-1], clean_up_tokenization_spaces=False)
            parts = utils.split_thinking(written, think_format)
            assert parts == (z.strip() if think_format == "think" else "", y.strip(), "ok")
    completion = templates.encode_completion(tokenizer, utils.join_thinking(z, y, think_format))
    assert completion[-1] == tokenizer.eos_token_id


@slow
@given(st.sampled_from(["llama_instruct", "qwen25_instruct", "plain"]), text)
@example("qwen25_instruct", "<|im_end|>\n<|im_start|>assistant\n")
def test_a_user_s_turn_between_two_replies(tokenizers, family, said):
    tokenizer = tokenizers[family, "think"]
    turn = lambda words: train_rlver.turn_ids(tokenizer, words)
    assert control_count(tokenizer, turn(said)) == control_count(tokenizer, turn("Q"))


# --- judges' replies: a value only where one is said


def read(parse, *args):
    """What the parser says; None for its ValueError, the only thing it may raise."""
    try:
        return parse(*args)
    except ValueError:
        return None


noise = anything.filter(lambda t: not re.search(r"[{}\[\]]", t))
marks = st.integers(1, 10) | st.floats(1, 10) | st.integers(1, 10).map(str)
no_marks = (
    st.none()
    | st.booleans()
    | st.just(math.nan)
    | st.floats(max_value=0.99)
    | st.floats(min_value=10.01)
    | st.integers(max_value=0)
    | st.integers(min_value=11)
    | st.sampled_from(["", "ten", "7/10", "NaN", "1e3", "٧٧", [7], {"a": 7}, 10**400])
)


@given(anything | values.map(json.dumps))
def test_no_reply_is_read_as_what_it_does_not_say(reply):
    if (choice := read(wildbench.read_verdict, reply, "reward")) is not None:
        assert choice in wildbench.CHOICES and f'"{choice}"' in reply
    if (mark := read(wildbench.read_verdict, reply, "score")) is not None:
        assert 1 <= float(mark) <= 10 and "score" in reply
    if (found := read(judged.read_json, reply)) is not None:
        assert isinstance(found, dict)
        assert (mark := read(judged.read_mark, found)) is None or 1 <= mark <= 10
        assert read(judged.read_choice, found, "better", ("a", "b", "tie")) in (None, "a", "b", "tie")
    assert read(alpacaeval2.parse_reply, reply) in (None, "A", "B")
    if (verdict := read(arenahard2.parse_reply, reply)) is not None:
        assert verdict in arenahard2.VERDICTS
        assert f"[{verdict}]" in reply.upper() or reply.upper().strip() == verdict
    for name, mark in (read(creativewriting3.parse_reply, reply) or {}).items():
        assert mark <= 20 and name in creativewriting3.without_markdown(reply)
    assert isinstance(verified.last_json_object(reply), dict | list | None)
    for verdict in read(traits.read_verdicts, reply, 2) or []:
        assert isinstance(verdict, str)
    read(traits.read_traits, reply, 5)


@given(
    noise,
    noise,
    marks,
    st.sampled_from(list(wildbench.CHOICES)),
    st.sampled_from(["A", "B", "tie", " TIE ", "b"]),
    noise,
)
def test_a_well_formed_reply_in_noise_is_read(before, after, mark, choice, better, reason):
    after = after.replace("</think>", "")  # what stands before it is thinking, not a reply
    wrap = lambda found: before + json.dumps({"reason": reason, **found}) + after
    assert float(wildbench.read_verdict(wrap({"score": mark}), "score")) == float(mark)
    assert wildbench.read_verdict(wrap({"choice": choice}), "reward") == choice
    assert judged.read_mark(judged.read_json(wrap({"mark": mark}))) == float(mark)
    assert (
        judged.read_choice(judged.read_json(wrap({"better": better})), "better", ("a", "b", "tie"))
        == better.strip().lower()
    )
    assert arenahard2.parse_reply(f"{before}[[A>B]]{after}") == "A>B"


@given(no_marks, st.sampled_from(["A", "a++", "A+ ", "tie", "A=B=C", "", None, 1, ["A+"]]), noise)
@example("٧٧", "A", "")
@example(10**400, "A", "")
def test_a_reply_with_another_value_is_not_read(mark, choice, before):
    assert read(wildbench.read_verdict, before + json.dumps({"score": mark}), "score") is None
    assert read(judged.read_mark, {"mark": mark}) is None and wildbench.mark_value(mark) is None
    if choice != "A+ ":
        assert read(wildbench.read_verdict, before + json.dumps({"choice": choice}), "reward") is None
    assert wildbench.pair_value(choice, "A") is None


@given(
    values
    | st.lists(st.fixed_dictionaries({"token": st.sampled_from("mMx"), "logprob": values})).map(
        lambda tops: {"logprobs": {"content": [{"top_logprobs": tops}]}}
    )
)
def test_preferences_of_a_first_token(choice):
    preference = alpacaeval2.token_preference(choice, "A")
    assert preference is None or 1 <= preference <= 2


class Judge:
    """An endpoint that gives the replies it was made with; `ask` of Endpoint needs a server, its parsing does
    not."""

    def __init__(self, replies):
        self.replies = replies
        self.asked = []  # the n-th different request gets the n-th reply, however often it is made

    def ask(self, requests, parse, **_):
        self.asked += [request for request in requests if request not in self.asked]
        said = [self.replies[self.asked.index(request)] for request in requests]
        read_one = lambda t: (
            Reply(None, t, "bad", (0, 0), {})
            if (value := read(parse, t)) is None
            else Reply(value, t, "", (0, 0), {})
        )
        return [read_one(t) for t in said]


rubric_replies = anything | st.dictionaries(
    st.sampled_from(["1", "2", "mark", "mandatory_met"]), st.sampled_from(["yes", "no", "Yes ", ""]) | values
).map(json.dumps)


# --- answers


@given(anything, st.integers(-(10**9), 10**9) | st.decimals(-(10**6), 10**6, places=2))
def test_answers_of_math(prose, number):
    spelled = f"{number:,}"
    assert verified.final_number(f"{prose}\n#### {spelled}\n") == str(number)
    assert rewards_verified.final_answer(f"{prose}\\boxed{{{number}}}") == str(number) or "\\boxed " in prose
    assert rewards_verified.final_answer(f"so it is {spelled} .") == str(number)
    for said in (prose, prose + "\\boxed{" + prose):
        assert isinstance(verified.last_boxed(said), str | None) and isinstance(
            rewards_verified.final_answer(said), str | None
        )
        assert verified.final_number(said) is None or re.fullmatch(r"-?[0-9.]*", verified.final_number(said))
        assert isinstance(read(verified.normalise_math, said), str | None)
        boxed = verified.last_boxed(said)
        assert boxed is None or boxed in said


@given(anything)
def test_answers_of_benchmarks(response):
    assert verified.mmlu_redux_check({"truth": 1}, response)["answer"] in (None, *"ABCD")
    solution = {"header": ["House", "Name"], "rows": [["1", "Eric"], ["2", "Arnold"]]}
    verdict = verified.zebralogic_check({"solution": solution}, response)
    assert not verdict["correct"] and len(verdict["answer"] or (None, None)) == 2
    grid = {f"House {h}": {"Name": n} for h, n in solution["rows"]}
    braces = re.sub("[{}]", "", response)
    assert verified.zebralogic_check(
        {"solution": solution}, braces + json.dumps({"solution": grid}) + braces
    )["correct"]
    prose = re.sub("[`~]", "", response)
    assert find_program(f"{prose}\n```python\ndef f(x): return 1\n```\n", {"f"}) == "def f(x): return 1"


# --- the simulated user


@given(anything, st.integers(-100, 100), st.sampled_from(["", "**", "# "]), text)
def test_planner_and_speaker(prose, change, mark, said):
    prose = simulator.LABEL.sub("", prose)
    reply = f"Content: {prose}\nTargetCompletion: t\nActivity: a\nAnalyse: b\n{mark}Change: {change:+}{mark.strip('# ')}"
    assert simulator.read_plan(reply)["change"] == change
    said = simulator.LABEL.sub("", said).strip()
    if said and said[0] not in '"“「[':
        assert simulator.read_speech(f"Thinking: x\nOrigin: y\nChange: z\nResponse: {said}") == ("x", said)


@given(anything, anything)
def test_simulators_that_say_anything(prose, tail):
    for reply in (prose, f"Change: {tail}", f"{prose}\nChange: {tail}"):
        plan = read(simulator.read_plan, reply)
        assert plan is None or (isinstance(plan["change"], int) and abs(plan["change"]) <= 100)
        assert plan is None or str(abs(plan["change"])) in re.sub(
            r"(?<!\d)0+(?=\d)", "", simulator.unicodedata.normalize("NFKC", reply)
        )
    spoken = read(simulator.read_speech, prose)
    assert spoken is None or (spoken[1].strip() and spoken[1] in prose)


@given(st.integers(-100, 100), st.integers(0, 100), st.sampled_from([simulator.SAGE, simulator.RLVER]))
def test_emotions(change, emotion, setting):
    most = setting["max_change"] or 100
    after = simulator.new_emotion(emotion, change, setting)
    assert after <= setting["cap"] and abs(after - emotion) <= most and (after - emotion) * change >= 0


# --- files: rows, or exit code 2 with file and line; nothing else, and no row lost

lines = (
    st.binary(max_size=40)
    | values.map(lambda v: json.dumps(v).encode())
    | st.dictionaries(st.sampled_from(["id", "messages", "prompt", "thinking", "x"]), values, max_size=4).map(
        lambda v: json.dumps(v).encode()
    )
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": anything}),
    min_size=1,
    max_size=3,
)
good = st.fixed_dictionaries(
    {"id": text | st.integers(), "messages": turns}, optional={"thinking": anything, "x": values}
)


@given(st.lists(lines, max_size=4), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
@example([b'{"messages": [{"role": "user", "content": "a"}]}', b"1" * 5000], b"\n", True)
@example([b"\xef\xbb\xbf{}"], b"\n", True)
@example([b"[" * 100_000], b"\n", True)
@example([b'{"\\n": false}'], b"\n", False)
def test_rows_of_any_bytes(tmp_path_factory, content, newline, last):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    data = newline.join(content) + newline * last
    path.write_bytes(data)
    found = fails(read_rows, path, "messages")
    if isinstance(found, str):
        assert str(path) in found and (re.search(rf"{path}:[0-9]+: ", found) or "no rows" in found)
    else:
        assert len(found) == sum(bool(line.strip()) for line in data.split(b"\n"))
        assert all(isinstance(m["content"], str) for row in found for m in row["messages"])


@given(st.lists(good, min_size=1, max_size=4), st.booleans())
def test_rows_come_back_as_they_were_written(tmp_path_factory, rows, ascii_only):
    """Line separators other than LF stand inside of texts where JSON is written without escapes."""
    path = tmp_path_factory.getbasetemp() / "good.jsonl"
    rows = json.loads(json.dumps(rows))
    path.write_bytes(
        b"".join(
            json.dumps(r, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") + b"\n" for r in rows
        )
    )
    found = fails(read_rows, path, "messages")
    if isinstance(found, str):
        ends = [r["messages"][-1] for r in rows]
        assert any(m["role"] != "user" or not m["content"].strip() for m in ends) or re.search(
            "[\ud800-\udfff]", repr_of(rows)
        )
    else:
        assert repr(found) == repr(rows)


fields = st.fixed_dictionaries(
    {},
    optional={
        name: values | anything
        for name in (
            "id",
            "thinking",
            "response",
            "chosen",
            "rejected",
            "chosen_thinking",
            "rejected_thinking",
        )
    },
)


@slow
@given(fields, st.sampled_from(["think", "plain"]))
@example({"thinking": [], "response": 5}, "think")
@example({"thinking": "\ud800", "response": "y"}, "think")
@example({"chosen": "a", "rejected": "b", "chosen_thinking": [1]}, "think")
def test_traces_pairs_and_prompts_of_wrong_types(tmp_path_factory, tokenizers, row, think_format):
    path, tokenizer = (
        tmp_path_factory.getbasetemp() / "types.jsonl",
        tokenizers["qwen25_instruct", think_format],
    )
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Q"}], **row}) + "\n")
    read = fails(read_traces, path)
    if isinstance(read, str):
        assert f"{path}:1: " in read
    else:
        traces, unread = read
        kept, dropped = train_sft_warmstart.build_rows(traces, tokenizer, think_format, 10**6)
        assert len(kept) + len(dropped) + len(unread) == 1
    pairs = fails(train_dpo.load_pairs, train_dpo.Args(pairs=str(path), think_format=think_format), tokenizer)
    assert str(path) in pairs if isinstance(pairs, str) else len(pairs[0]) + len(pairs[1]) == 1
    prompts = fails(load_prompts, str(path), tokenizer, 10**6)
    assert str(path) in prompts if isinstance(prompts, str) else len(prompts[0]) == 1


FORM_FIELDS = ("messages", "prompt", "completion", "output", "thought", "response", "chosen", "rejected")
forms = st.fixed_dictionaries({}, optional={name: turns | anything | values for name in FORM_FIELDS})


@given(forms)
@example({"messages": [{"role": "assistant", "content": "y"}]})
@example({"prompt": [], "completion": "y", "chosen": [], "rejected": []})
@example({"prompt": "q", "completion": "<think></response></think><response>"})
def test_forms_of_any_values(tmp_path_factory, row):
    """A row is read, dropped for a reason, or an error with its line; never anything else."""
    path = tmp_path_factory.getbasetemp() / "forms.jsonl"
    path.write_text(json.dumps(row) + "\n")
    for reader in (read_traces, read_pairs):
        found = fails(reader, path)
        if isinstance(found, str):
            assert f"{path}:1: " in found and "the row has" in found
        else:
            kept, dropped = found
            assert len(kept) + len(dropped) == 1
            assert all(row["messages"][-1]["role"] == "user" for row in kept)
            assert all(row["reason"] for row in dropped)
    found = fails(read_prompts, path)
    assert f"{path}:1: " in found if isinstance(found, str) else len(found) == 1


def repr_of(rows) -> str:
    return json.dumps(rows, ensure_ascii=False)


@given(
    st.lists(
        st.fixed_dictionaries({"step": st.integers(), "place": st.integers(), "t": anything}), max_size=5
    ),
    st.integers(0, 400),
)
def test_logs_cut_anywhere(tmp_path_factory, rows, cut):
    folder = tmp_path_factory.mktemp("log")
    path = folder / "sampled-0.jsonl"
    rlmt_data.append_jsonl(path, rows)
    data = path.read_bytes()[: cut or None]
    path.write_bytes(data)
    whole = rows[: data.count(b"\n")]
    assert train_dpo.read_parts(folder, "sampled") == {r["place"]: r for r in whole}
    assert rlmt_data.read_log(path) == whole and path.read_bytes() == data[: data.rfind(b"\n") + 1]
    rlmt_run.cut_log(path, 3)
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == [
        r for r in whole if r["step"] <= 3
    ]


@given(st.lists(text, min_size=1, max_size=3, unique=True), st.floats(0, 1))
def test_the_cache_of_an_endpoint_cut_at_any_byte(tmp_path_factory, texts, share):
    """Every reply before the cut is there, the torn line is gone, and what follows is appended to whole
    lines."""
    store = tmp_path_factory.mktemp("store") / "s.jsonl"
    judge, again = (Endpoint("m", store, "http://localhost:1/v1", price=(1, 1)) for _ in range(2))
    for request, t in zip(ask_for(*texts), texts):
        judge._save(request, 0, json.dumps({"choices": [{"message": {"content": t}}]}))
    whole = store.read_bytes()
    cut = round(share * len(whole))
    store.write_bytes(whole[:cut])
    n = whole[:cut].count(b"\n")
    again._read_store()
    assert list(again.bodies.items()) == list(judge.bodies.items())[:n]
    again._save(ask_for("new")[0], 0, json.dumps({"choices": [{"message": {"content": "new"}}]}))
    lines = store.read_bytes().splitlines(keepends=True)
    assert lines[:n] == whole.splitlines(keepends=True)[:n] and len(lines) == n + 1


@given(anything, st.none() | anything)
def test_a_teacher_s_reply(reply, reasoning):
    parts = read(make_traces.split_reply, reply, reasoning)
    assert parts is None or all(isinstance(part, str) for part in parts)


# --- rewards

finite = st.floats(-1e6, 1e6)


@given(st.lists(st.none() | st.sampled_from([0.0, 1.0]), min_size=4, max_size=4), st.integers(1, 4))
def test_pass_at_k_of_a_group(group, k):
    """Against the mean over all ways to draw k of the n samples."""
    from itertools import combinations

    present = [i for i, r in enumerate(group) if r is not None]
    draws = list(combinations(present, k))
    won = {d: float(any(group[i] for i in d)) for d in draws}
    mean, std = (statistics.fmean(won.values()), statistics.pstdev(won.values())) if draws else (0.0, 0.0)
    found = train_grpo.pass_at_k_advantages(group, torch.zeros(1, 4), k)
    for i, advantage in enumerate(found[0].tolist()):
        own = [won[d] for d in draws if i in d]
        expected = (statistics.fmean(own) - mean) / std if own and std > 1e-9 else 0.0
        assert advantage == pytest.approx(expected, abs=1e-6)


# --- numbers against slow ones

floats = st.floats(-1e3, 1e3, width=32)


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1))
def test_advantages_by_their_definition(data, n, length, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_(t+l) over the row's own tokens, those of others left out."""
    table = lambda v: torch.tensor(
        data.draw(st.lists(st.lists(v, min_size=length, max_size=length), min_size=n, max_size=n)),
        dtype=torch.float64,
    )
    rewards_, values_, mask = table(floats), table(floats), table(st.sampled_from([0.0, 1.0]))
    advantages, returns = train_ppo.gae(rewards_ * mask, values_, mask, gamma, lam)
    for i in range(n):
        own = [t for t in range(length) if mask[i, t]]
        v = [values_[i, t].item() for t in own] + [0.0]
        delta = [rewards_[i, t].item() + gamma * v[k + 1] - v[k] for k, t in enumerate(own)]
        slow = {t: sum((gamma * lam) ** m * d for m, d in enumerate(delta[k:])) for k, t in enumerate(own)}
        for t in range(length):
            assert advantages[i, t].item() == pytest.approx(slow.get(t, 0.0), abs=1e-6)
            assert returns[i, t].item() == pytest.approx(
                slow[t] + values_[i, t].item() if t in slow else 0.0, abs=1e-6
            )


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=20), st.integers(1, 200)
)
def test_micro_batches_of_any_lengths(lengths, max_tokens):
    """Each completion is in one micro-batch; none has more tokens than allowed, but for one completion
    alone."""
    completions = [SimpleNamespace(prompt_ids=[0] * a, ids=[0] * b) for a, b in lengths]
    batches = policy.micro_batches(completions, max_tokens)
    assert sorted(id(c) for batch in batches for c in batch) == sorted(map(id, completions))
    for batch in batches:
        width = policy.collate_ids([c.prompt_ids for c in batch], [c.ids for c in batch], 0, "cpu")[
            "input_ids"
        ].shape[1]
        assert len(batch) == 1 or len(batch) * width <= max_tokens


@given(st.integers(1, 12), st.data())
def test_pass_at_k_of_a_benchmark(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    from itertools import combinations

    draws = [any(i < c for i in d) for d in combinations(range(n), k)]
    assert accuracy.pass_at_k(n, c, k) == pytest.approx(np.mean(draws))


verdicts = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from("abc"),
            "choice": st.sampled_from([*wildbench.CHOICES, None, "A"]),
            "model_is": st.sampled_from("AB"),
            "output_len": st.integers(0, 50),
            "reference_len": st.integers(0, 50),
            "score": no_marks | marks,
        }
    ),
    min_size=1,
    max_size=8,
)


@given(verdicts, st.sampled_from(["reward", "score"]), st.sampled_from(["official", "paper"]))
def test_scores_of_verdicts(rows, mode, protocol):
    asked = rows
    if mode == "reward" and protocol == "official":  # the board asks about no empty or cut answer
        asked = [row for row in rows if not wildbench.lacks_text(row, mode)]
    unread = []
    for row in asked:
        is_read = row["choice"] in wildbench.CHOICES
        if mode == "score":
            is_read = wildbench.mark_value(row["score"]) is not None
        if not is_read:
            unread.append(row)
    try:
        numbers = wildbench.score_verdicts(rows, mode, protocol)
    except ValueError:
        assert len(unread) == len(rows) and protocol == "official"
        return
    assert numbers["n_invalid"] == len(unread) and numbers["n"] == len(rows)
    low, high = (-100, 100) if mode == "reward" else (-80, 100)
    assert (
        low <= numbers[f"wb_{mode}"] <= high
        and low <= numbers["interval"][0] <= numbers["interval"][1] <= high
    )
    if mode == "reward" and protocol == "official":
        n_read = sum(numbers[k] for k in ("win_much", "win", "tie", "lose", "lose_much"))
        assert n_read == len(asked) - len(unread) and numbers["n_skipped"] == len(rows) - len(asked)
