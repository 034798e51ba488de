"""SAGE's Sentient benchmark: the emotion in which a simulated user leaves a conversation with the model.

    python eval_sentient.py --model results/rlver/model --profiles path/to/simulator_profile_withfirsttalk.jsonl \\
        --simulator deepseek-chat --simulator-url https://ENDPOINT/v1 --held-out-simulator gpt-4o-2024-08-06
    python eval_sentient.py --from-dialogues dialogues.jsonl.gz --out score.json          # no model, no simulator

Numbers, of each simulator: `mean_emotion` of the last turns (the Sentient score), `success` (100) and `failure` (below 10).
simulator.py says how the user works. Praise alone raises the first simulator, which a policy may have been trained with: the
score of a second one, --held-out-simulator, stands beside it, from conversations of its own. A simulator is a model's name at
an OpenAI-compatible endpoint, or file.py:function (dialogue, setting) -> (utterance, change), as data/toy/users.py:user.

`--protocol sage` (default) and `rlver` (its training runs) differ: start 40 or 30; changes clipped to -10 .. 10, or not; ends
at 100 and below 10, or at 0; ten replies, the last of them not heard, or eight. Of a malformed reply (thinking not closed,
cut off, ...) what follows the last </think>, the whole text if there is none, is said, or the dialogue ends and counts as
emotion 0. Both are counted. The flags under "protocol" change single values. The simulator's prompts are our own wording, so
published scores are no comparison unless --from-dialogues gets dialogues of the official tool.

A planner or speaker whose replies stay unreadable, and a dialogue that no longer fits the model's context, leave a dialogue
without a score: counted, listed, never an emotion; above 1 % of them there is no headline.
Writes results/<run>/: config.json, command.txt, env.txt, turns.jsonl and turns_held_out.jsonl (turn by turn, what --resume
reads), simulator.jsonl and simulator_held_out.jsonl (raw replies), dialogues.jsonl and dialogues_held_out.jsonl (SAGE's
format), summary.json; and lines in results/runs.csv.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import runs  # isort: skip

from benchmarks import shared as evaluation
import generation
from rewards import simulated_user as simulator
import utils
from endpoint import OPENAI_URL, Endpoint, api_key, token_limits


@dataclass
class Args:
    # model and data
    model: str = ""
    """Folder or hub name of the model to evaluate; with --model-url the name that the endpoint knows."""
    model_url: str = ""
    """OpenAI-compatible endpoint that generates, e.g. http://localhost:8000/v1; empty: generate here."""
    profiles: str = ""
    """Users: rows {id, player, scene, task, first_talk}, in Chinese or English; see data/README.md."""
    limit: int = 0
    """Only the first users of the file; 0: all."""
    think_format: Literal["auto", "think", "plain", "zero_think", "zero_plain"] = "auto"
    """auto: as the checkpoint's think_format.json says; without one, or behind an endpoint, `plain`, and an answer with a
    </think> ends the run."""
    chat_template: str = "auto"
    """As in train_grpo.py."""
    ask_thinking: bool = False
    """The system line asks for a <think> block, of a model that was not trained to write one (RLVER's think-then-say)."""
    keep_thinking: bool = False
    """The model reads the thinking of its earlier turns; else only what it said."""
    # generation
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM where a GPU and vLLM are there, else transformers' generate."""
    temperature: float = 0.7
    """0 is greedy. SAGE does not state one; our choice."""
    top_p: float = 1.0
    max_tokens: int = 4096
    """New tokens a turn (RLVER: 5000)."""
    batch_size: int = 64
    """Dialogues a batch with transformers' generate."""
    # simulated user
    simulator: str = ""
    """A model's name at --simulator-url, or file.py:function. SAGE's board: DeepSeek-V3 of December 2024."""
    simulator_url: str = ""
    """OpenAI-compatible endpoint; empty: OPENAI_BASE_URL, or the official one. The key comes from OPENAI_API_KEY."""
    held_out_simulator: str = ""
    """The second one; empty: none."""
    held_out_simulator_url: str = ""
    user: Literal["vanilla", "challenging"] = "vanilla"
    """challenging: hides what it wants, and only that raises its emotion."""
    user_temperature: float = 0.5
    """Of planner and speaker (RLVER: 0.5)."""
    user_max_tokens: int = 2048
    """Of a reply of theirs."""
    concurrency: int = 32
    """Calls at a time."""
    budget: float = 0.0
    """US dollars that each simulator may cost; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by a simulator."""
    max_invalid: float = 0.01
    """Share of dialogues without a score above which no headline is given."""
    # protocol
    protocol: Literal["sage", "rlver"] = "sage"
    """What differs: the top of this script."""
    start: int | None = None
    """Emotion at the start; this and those below: None is as the protocol has it."""
    max_change: int | None = None
    """A change is clipped to this and its negative; 0: not clipped."""
    high: int | None = None
    """A dialogue ends at this emotion; 0: it does not."""
    low: int | None = None
    """A dialogue ends below this emotion."""
    turns: int | None = None
    """Replies of the model at most."""
    # instead of a run
    from_dialogues: str = ""
    """Stored dialogues {id, emo_point, history}, jsonl or jsonl.gz; scores them into the file --out."""
    # run
    seed: int = 0
    """Of sampling, of orders that are drawn, and of intervals."""
    out: str = ""
    """Run folder; empty: results/eval_sentient__<model>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Keep what a run folder already has: turns, and every reply of the simulators."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, print calls and cost, and stop before a model is loaded or asked."""

    def setting(self) -> dict:
        """The simulator's setting: that of the protocol, with what flags change."""
        out = {
            **(simulator.SAGE if self.protocol == "sage" else simulator.RLVER),
            "kind": self.user,
            "seed": self.seed,
            "temperature": self.user_temperature,
            "max_tokens": self.user_max_tokens,
        }
        for name in ("start", "max_change", "high", "low", "turns"):
            if (value := getattr(self, name)) is not None:
                out[name] = value or (None if name in ("max_change", "high") else value)
        return out


# --- 1. stored dialogues


def check_record(dialogue: dict, setting: dict) -> list[str]:
    """What in a stored dialogue is not as the setting has it: start, every update of the emotion, its end, the final value."""
    users = [m for m in dialogue["history"] if m["role"] == "user"]
    found, emotion, tongue = [], users[0]["emotion-point"], simulator.language(users[0]["content"])
    if emotion != setting["start"]:
        found.append(f"starts at {emotion}, not at {setting['start']}")
    for number, turn in enumerate(users[1:], 2):
        planning = turn.get("planning")
        change = turn.get("change", planning.get("change") if isinstance(planning, dict) else None)
        if not isinstance(change, int | float):
            found.append(f"turn {number} has no change")
        elif turn["emotion-point"] != simulator.new_emotion(emotion, change, setting):
            found.append(f"turn {number}: {emotion} and a change of {change} make {turn['emotion-point']}")
        ended = simulator.ending(turn["emotion-point"], turn["content"], tongue, setting)
        if ended and number < len(users):
            found.append(f"goes on after turn {number} ({ended})")
        emotion = turn["emotion-point"]
    if dialogue["emo_point"] != emotion:
        found.append(f"ends at {emotion}, but emo_point is {dialogue['emo_point']}")
    return found


def read_dialogues(path: str) -> list[dict]:
    """Stored dialogues; exits with 2 for a row that is none."""
    rows = runs.read_rows(path, "emo_point", "history")
    is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    for number, row in enumerate(rows, 1):
        where, history = f"{path}:{number}: ", row["history"]
        if not is_number(row["emo_point"]):
            runs.fail(f"{where}emo_point is {row['emo_point']!r}, not a number")
        if not (isinstance(history, list) and all(isinstance(m, dict) and "role" in m for m in history)):
            runs.fail(f"{where}'history' must be a list of {{'role', 'content'}}")
        users = [m for m in history if m["role"] == "user"]
        if not users or not all(
            is_number(m.get("emotion-point")) and isinstance(m.get("content"), str) for m in users
        ):
            runs.fail(f"{where}every turn of the user needs 'content', a text, and 'emotion-point', a number")
        if not isinstance(row.setdefault("ended", ""), str):
            runs.fail(f"{where}'ended' is not a text")
    return rows


def rescore(args: Args) -> None:
    """--from-dialogues: stored dialogues to numbers."""
    if not args.out:
        runs.fail("--from-dialogues needs --out OUT.json")
    rows, setting = read_dialogues(args.from_dialogues), args.setting()
    warnings = [f"dialogue {row['id']}: {text}" for row in rows for text in check_record(row, setting)]
    numbers = runs.or_fail(numbers_of, rows, args)
    result = numbers | {"protocol": args.protocol, "from": args.from_dialogues, "warnings": warnings}
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    warn(warnings)
    print(json.dumps({k: v for k, v in result.items() if k != "warnings"} | {"n_warnings": len(warnings)}))


def numbers_of(dialogues: list[dict], args: Args) -> dict:
    """simulator.score with interval, and the share of the model's replies that are well-formed."""
    numbers = simulator.score(dialogues)
    finals = [e for e in map(simulator.final_emotion, dialogues) if e is not None]
    numbers["interval"] = evaluation.bootstrap(finals, args.seed)
    status = [m["status"] for d in dialogues for m in d["history"] if "status" in m]
    numbers["format_ok"] = status.count("ok") / len(status) if status else None
    return numbers


def warn(lines: list[str]) -> None:
    """At most ten lines on stderr, and how many more there are."""
    for line in lines[:10] + [f"and {len(lines) - 10} more"] * (len(lines) > 10):
        print(f"WARNING: {line}", file=sys.stderr)


# --- 2. the run


def load_model(args: Args, run: Path) -> Callable:
    """generate(conversations, seeds) -> (text, finished, tokens) of each, None where it does not fit the model's context."""
    if args.model_url:
        model = Endpoint(args.model, run / "model.jsonl", args.model_url, args.concurrency)
        sampling = evaluation.endpoint_sampling(args, args.temperature)

        def by_endpoint(conversations, seeds):
            asked = model.ask(
                [{"messages": messages, **sampling} for messages in conversations], name="model"
            )
            if lost := [reply.error for reply in asked if reply.error]:
                runs.fail(f"{args.model}: {lost[0]}; the same command with --resume goes on")
            return [
                (reply.text, reply.choice.get("finish_reason") != "length", reply.usage[1]) for reply in asked
            ]

        return by_endpoint
    tokenizer, limit = evaluation.load_tokenizer(args), context(args) - args.max_tokens
    stop = "</response>" if evaluation.think_format(args).startswith("zero") else ""
    sampler = generation.Sampler(
        args.model,
        tokenizer,
        args.temperature,
        args.max_tokens,
        args.top_p,
        stop,
        runs.use_vllm(args.rollout),
    )

    def generate(conversations, seeds):
        prompts = [utils.encode_prompt(tokenizer, messages) for messages in conversations]
        fit = [i for i, ids in enumerate(prompts) if len(ids) <= limit]
        outs = sampler.complete([prompts[i] for i in fit], [seeds[i] for i in fit], len(fit)) if fit else ()
        done = {fit[n]: (text, finished, len(ids)) for n, text, finished, ids in outs}
        return [done.get(i) for i in range(len(prompts))]

    return generate


def context(args: Args) -> int:
    """Tokens that the model can read and write."""
    config = runs.load_config(args.model).get_text_config()
    return getattr(config, "max_position_embeddings", None) or 10**9


def talk(
    args: Args, profiles: list[dict], user: Endpoint | Callable, generate: Callable, path: Path
) -> list[dict]:
    """The dialogues of all profiles with one simulator, a turn of all at a time. Every step is a line of `path`, and the next
    start goes on after the last whole one."""
    setting, think_format = args.setting(), evaluation.think_format(args)
    dialogues = [simulator.start(profile, setting) for profile in profiles]
    by_id = {d["id"]: d for d in dialogues}
    for step in runs.read_kept(path):
        for row in step["dialogues"]:
            by_id[row["id"]] |= row | {"history": by_id[row["id"]]["history"] + row["history"]}
    known = {d["id"]: (len(d["history"]), d["ended"]) for d in dialogues}

    def keep() -> None:
        changed = [d for d in dialogues if known[d["id"]] != (len(d["history"]), d["ended"])]
        changed = [d for d in changed if d["ended"] != "simulator_failed"]  # --resume asks it again
        rows = [
            {k: d[k] for k in d if k != "profile"} | {"history": d["history"][known[d["id"]][0] :]}
            for d in changed
        ]
        if rows:
            runs.append_jsonl(path, [{"dialogues": rows}])
        known.update({d["id"]: (len(d["history"]), d["ended"]) for d in changed})

    here = not args.model_url and not runs.use_vllm(args.rollout)
    size = (
        args.batch_size if here else len(dialogues)
    )  # a batch and its seeds do not depend on what is done already
    for turn in range(setting["turns"]):
        if all(d["ended"] for d in dialogues):
            break
        for first in range(0, len(dialogues), size):
            rows = enumerate(dialogues[first : first + size], first)
            if not (due := [(i, d) for i, d in rows if not d["ended"] and simulator.count_replies(d) == turn]):
                continue
            seeds = [(args.seed * 1_000_003 + i) * 1009 + turn for i, _ in due]
            asked = [simulator.chat_messages(d, args.ask_thinking, args.keep_thinking) for _, d in due]
            for (_, dialogue), out in zip(due, generate(asked, seeds), strict=True):
                if out is None:
                    dialogue |= {"ended": "too_long", "error": "no room for a reply in the model's context"}
                else:
                    evaluation.check_plain(args, out[0])
                    simulator.add_model_turn(dialogue, setting, out[0], think_format, out[1])
                    dialogue["history"][-1]["n_tokens"] = out[2]
            keep()
        simulator.user_turns(dialogues, setting, user)
        keep()
        going, mean = (
            sum(not d["ended"] for d in dialogues),
            sum(d["emo_point"] for d in dialogues) / len(dialogues),
        )
        print(
            f"turn {turn + 1} of {setting['turns']}: {going} of {len(dialogues)} go on, emotion {mean:.1f}",
            flush=True,
        )
    return dialogues


def estimate(profiles: list[dict], args: Args) -> str:
    """What a simulator is asked at most; a turn of the model and the user's next are taken to have 300 tokens."""
    setting, plan = args.setting(), {"TargetCompletion": "", "activity": "", "analyse": "", "change": 0}
    turns, starts = (
        setting["turns"] - (not setting["answer_last"]),
        [simulator.start(p, args.setting()) for p in profiles],
    )
    requests = [simulator.planner_request(d, setting) for d in starts]
    requests += [simulator.speaker_request(d, setting, plan) for d in starts]
    calls = turns * len(requests)
    tokens_in = turns * sum(token_limits(r)[0] for r in requests) + 300 * len(requests) * sum(
        range(1, turns + 1)
    )
    dollars = (tokens_in * args.price[0] + calls * args.user_max_tokens * args.price[1]) / 1e6
    return f"at most {calls} calls, about {tokens_in} tokens in, at most {calls * args.user_max_tokens} out, ${dollars:.2f}"


def roles(args: Args) -> dict[str, tuple[str, str]]:
    """Names and URLs of the simulators."""
    both = {
        "simulator": (args.simulator, args.simulator_url),
        "simulator_held_out": (args.held_out_simulator, args.held_out_simulator_url),
    }
    return {role: name for role, name in both.items() if name[0]}


def load_user(args: Args, role: str, run: Path) -> Endpoint | Callable:
    name, url = roles(args)[role]
    if ".py:" in name:
        return runs.load_function(name)
    return Endpoint(name, run / f"{role}.jsonl", url, args.concurrency, budget=args.budget, price=args.price)


def check(args: Args) -> list[dict]:
    """The profiles; exits with 2 for what cannot be run."""
    for name in ("model", "profiles", "simulator"):
        if not getattr(args, name):
            runs.fail(f"--{name} is missing; or name stored dialogues by --from-dialogues")
    setting = args.setting()
    if setting["turns"] < 1 or args.batch_size < 1 or (setting["max_change"] or 0) < 0:
        runs.fail("--turns and --batch-size must be 1 or more, --max-change not negative")
    for role in roles(args):
        user = load_user(args, role, Path())
        if isinstance(user, Endpoint) and user.base_url == OPENAI_URL and not api_key():
            runs.fail(
                "the simulator needs a key in OPENAI_API_KEY, or an endpoint of your own, --simulator-url"
            )
    if (args.held_out_simulator, args.held_out_simulator_url) == (args.simulator, args.simulator_url):
        runs.fail("--held-out-simulator is the first simulator; name another one")
    profiles = simulator.read_profiles(args.profiles)[: args.limit or None]
    if not args.model_url:
        tokenizer = evaluation.load_tokenizer(args)
        first = [simulator.chat_messages(simulator.start(p, setting), args.ask_thinking) for p in profiles]
        longest = max(len(runs.or_fail(utils.encode_prompt, tokenizer, messages)) for messages in first)
        if longest + args.max_tokens > context(args):
            runs.fail(
                f"a first prompt of {longest} tokens and --max-tokens {args.max_tokens} are more than the "
                f"{context(args)} tokens of {args.model}'s context"
            )
    if args.ask_thinking and evaluation.think_format(args) == "plain":
        runs.fail(
            "--ask-thinking needs --think-format think: with plain text the user would hear the thinking"
        )
    return profiles


def main(args: Args) -> None:
    if args.from_dialogues:
        return rescore(args)

    # --- data, checked before anything is loaded or asked
    profiles, setting = check(args), args.setting()
    for role, (name, _) in roles(args).items():
        print(f"{role} {name}: {'no calls' if '.py:' in name else estimate(profiles, args)}")
    if args.dry_run:
        return
    run = runs.start_run(args, "eval_sentient", args.model)
    if (run / "summary.json").exists():
        return print(f"{run} is complete; --overwrite starts it anew")

    # --- talk with each simulator, score
    model, results, index = load_model(args, run), {}, []
    for role, (name, url) in roles(args).items():
        suffix = role.removeprefix("simulator")
        dialogues = talk(args, profiles, load_user(args, role, run), model, run / f"turns{suffix}.jsonl")
        (run / f"dialogues{suffix}.jsonl").write_text(
            "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in dialogues)
        )
        numbers = runs.or_fail(numbers_of, dialogues, args)
        if numbers["n_invalid"] > args.max_invalid * numbers["n"]:
            numbers["without_headline"], numbers["mean_emotion"] = numbers["mean_emotion"], None
        warn(
            [
                f"dialogue {d['id']} has no score: {d['ended']}, {d['error']}"
                for d in dialogues
                if "error" in d
            ]
        )
        place = evaluation.judge_place(name, url)
        own = [
            setting | {"seed": 0},
            name,
            place,
            simulator.SYSTEM,
            simulator.ASK_THINKING,
            simulator.PLANNER,
            simulator.SPEAKER,
            list(simulator.RULES.values()),
            profiles,
        ]
        fingerprint = hashlib.sha256(json.dumps(own).encode()).hexdigest()[:12]
        results[role] = {"name": name, "fingerprint": fingerprint, **numbers}
        common = {
            "model": args.model,
            "benchmark": f"sentient{suffix}",
            "n": numbers["n"],
            "n_invalid": numbers["n_invalid"],
            "temperature": args.temperature,
            "judge": name,
            "fingerprint": fingerprint,
        }
        low, high = numbers["interval"]
        index.append(
            common | {"metric": "mean_emotion", "value": numbers["mean_emotion"], "low": low, "high": high}
        )
        index += [
            common | {"metric": key, "value": numbers[key]}
            for key in ("success", "failure", "mean_turns", "format_ok")
        ]
    runs.write_summary(run, {"model": args.model, "protocol": args.protocol, "setting": setting, **results})
    runs.add_to_index(run, index)


if __name__ == "__main__":
    main(runs.parse_args(Args, {}))
