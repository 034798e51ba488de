"""Evaluates on SAGE's Sentient benchmark: in which emotion does a simulated user leave the conversation?

    python eval_sentient.py --model results/rlver/model --profiles simulator_profile_withfirsttalk.jsonl \\
        --simulator deepseek-chat --simulator-url https://ENDPOINT/v1 --held-out-simulator gpt-4o-2024-08-06
    python eval_sentient.py --from-dialogues dialogues.jsonl.gz --out score.json     # no model, no simulator
    python eval_sentient.py --from-dialogues dialogues.jsonl.gz --out score.json --judge deepseek-chat \\
        --judge-url https://ENDPOINT/v1                                              # what the replies did

Reports `mean_emotion` of the last turns (the Sentient score), `success` (dialogues that end at 100) and
`failure` (below 10). rewards/simulated_user.py says how a user works. A simulator is a model at an
OpenAI-compatible endpoint, or file.py:function (dialogue, setting) -> (utterance, change), such as
data/toy/users.py:user.

Use a second simulator: a policy can learn to please the one that it was trained with, for instance by praise.
--held-out-simulator gets conversations and a score of its own.

`--protocol sage` (default) and `rlver` (its training runs); --start, --low and --turns change single values,
all others are in rewards/simulated_user.py:

                         sage                                          rlver
    start                emotion 40                                    emotion 30
    changes              clipped to -10 .. 10                          not clipped
    end                  at 100, below 10, or at a goodbye             below 1, or at a goodbye
    replies              10, the user does not answer the last         8
    malformed reply      the user hears what follows the last          the dialogue ends with
                         </think>, or all of it if there is none       emotion 0

`emotion_curve` is the mean emotion at the start and after each answer of the user; a dialogue that has ended
keeps its last one. With --judge (RLVER: DeepSeek-V3), a language model also reads the dialogues: `strategies`
(how often a group of strategies is used, and how the emotion changes after it) and `capabilities` (five marks
from 1 to 5; their instructions can be read from a file, --template), see benchmarks/sentient.py. A judge
file.py:function finds strategies alone.

`format_ok` is the share of well-formed replies. The simulator's prompts are our own wording. For a comparison
with published scores, pass dialogues of the official tool to --from-dialogues.

A dialogue has no score if the planner or the speaker stays unreadable, if it outgrows the model's context, or
if --model-url refuses it. Such dialogues are counted, and dialogues.jsonl has their `error`. Above 1 % there is
no headline: `mean_emotion` is null. If a simulator behind an endpoint gave more of them no reply, the run
ends without a score, and --resume asks again.

Everything is checked before anything is generated; a simulator behind an endpoint is asked its first request.
`--dry-run` makes the same checks.

Writes into its run folder: config.json, command.txt, env.txt; dialogues.jsonl (SAGE's format; written after every
turn, and read by --resume), also with the suffix _held_out; simulator.jsonl and
simulator_held_out.jsonl (raw replies); summary.json. With --judge also judge.jsonl (raw replies) and
judged.jsonl (what it says of each dialogue); with --from-dialogues next to --out, as judged_<its name>.jsonl.
Adds lines to runs.csv beside it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import context_length, encode_prompt, load_config, read_trained_as
from rlmt.data import read_log, read_rows, write_jsonl
from rlmt.endpoint import has_no_reply
from rlmt.run import Run, parse_args
from rlmt.sampler import Sampling, text_of
from rlmt.saved import saved_sampler
from benchmarks import sentient, shared
from benchmarks.flags import JudgeFlags, ModelFlags
from benchmarks.scoring import for_summary, index_row
from utils import fail, wants_vllm
from rewards import simulated_user, user_prompts

# lines of runs.csv: metric, and the key of its interval
METRICS = {"mean_emotion": "interval", "success": "", "failure": "", "mean_turns": "", "format_ok": ""}


@dataclass
class Args(JudgeFlags, ModelFlags):
    # benchmark
    profiles: str = ""
    """Users: rows {id, player, scene, task, first_talk}, in Chinese or English; see data/README.md."""
    ask_thinking: bool = False
    """Ask for a <think> block in the system line; on by itself if the model was trained so, see
    keep_thinking."""
    keep_thinking: bool = False
    """Let the model read the thinking of its earlier turns; otherwise it reads only what it said. On by
    itself if the model's think_format.json says that it was trained so, as train_rlver.py's do."""
    temperature: float = 0.7
    """0 is greedy. SAGE does not state one; 0.7 is our choice."""
    max_tokens: int = 4096
    """New tokens per reply (RLVER: 5000)."""
    # simulated user
    simulator: str = ""
    """A model's name at --simulator-url, or file.py:function. SAGE's board: DeepSeek-V3 of December 2024."""
    simulator_url: str = ""
    """OpenAI-compatible endpoint; empty: OPENAI_BASE_URL, else the official one."""
    held_out_simulator: str = ""
    """A second simulator, named in the same way; empty: none."""
    held_out_simulator_url: str = ""
    """Its endpoint."""
    user: Literal["vanilla", "challenging"] = "vanilla"
    """challenging: the user hides the wish, and only its fulfilment raises the emotion."""
    judge_max_tokens: int = 4096
    """Tokens of a reply of the judge."""
    # protocol
    protocol: Literal["sage", "rlver"] = "sage"
    """See the table at the top of this script."""
    start: int | None = None
    """Emotion at the start. None, in this and the next two flags: as the protocol has it."""
    low: int | None = None
    """A dialogue ends below this emotion."""
    turns: int | None = None
    """Replies of the model at most."""
    # instead of a run
    from_dialogues: str = ""
    """Stored dialogues {id, emo_point, history}, jsonl or jsonl.gz. Writes their score to the file --out."""

    @property
    def setting(self) -> dict:
        """Returns the simulator's setting."""
        return simulated_user.setting_of(self.protocol, self)


# --- 1. stored dialogues


def rescore(args: Args) -> None:
    """Scores the dialogues of --from-dialogues into the file --out."""
    if not args.out:
        fail("--from-dialogues needs --out OUT.json")
    shared.check_stored(args, "from_dialogues", *(field.name for field in fields(JudgeFlags)))
    sentient.check_judge(args)
    dialogues = read_rows(args.from_dialogues, "emo_point", "history")
    scores = for_summary(sentient.score(args, dialogues))
    scores["from"] = args.from_dialogues
    folder = Path(args.out).parent
    if args.dry_run:
        shared.try_judge(args, folder, [sentient.strategy_request(args, dialogues[0])])
        return
    if args.judge:
        folder.mkdir(parents=True, exist_ok=True)
        scores |= sentient.judge(args, dialogues, folder, f"_{Path(args.out).stem}")

    shared.write_scores(args, scores)
    print(json.dumps(scores))


# --- 2. the tested model


@contextmanager
def load_model(args: Args, run: Path) -> Iterator[Callable[..., list[shared.Answer]]]:
    """Gives the function (conversations, seeds) -> replies, which sends messages or token ids; frees the
    model's memory at the end."""
    if shared.is_chat(args):

        def generate(conversations: list[list[dict]], seeds: list[int]) -> list[shared.Answer]:
            return shared.ask_by_messages(args, conversations, seeds, args.temperature, run)

        yield generate
        return

    tokenizer = shared.load_model_tokenizer(args)
    stop = shared.stop_string(shared.think_format(args))
    sampling = Sampling(args.temperature, args.max_tokens, args.top_p, stop)
    context = context_length(load_config(args.model))
    max_prompt_tokens = context - args.max_tokens

    def generate(conversations: list[list[dict]], seeds: list[int]) -> list[shared.Answer]:
        prompts = [encode_prompt(tokenizer, messages) for messages in conversations]
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt) <= max_prompt_tokens]
        replies: list[shared.Answer] = ["no room for a reply in the model's context"] * len(prompts)
        if fitting:
            samples = sampler.sample([prompts[i] for i in fitting], [seeds[i] for i in fitting])
            for n, sample in samples:
                text = text_of(tokenizer, sample)
                replies[fitting[n]] = (text, sample.finished, len(sample.ids))
        return replies

    how_sampled = shared.how_sampled(args, run)
    with saved_sampler(args.model, tokenizer, sampling, context, **how_sampled) as sampler:
        yield generate


# --- 3. the dialogues


def talk(
    args: Args, profiles: list[dict], user: simulated_user.User, generate: Callable, path: Path
) -> list[dict]:
    """Holds the dialogues of all profiles with one simulator; each pass brings all of them one turn further.

    `generate` is that of `load_model`. `path` gets them after every turn. If the file exists, goes on from there,
    and asks a simulator that failed again, and a model that gave no reply.
    """
    setting = args.setting
    dialogues = read_log(path) or [simulated_user.start(profile, setting) for profile in profiles]
    for dialogue in dialogues:
        if dialogue["ended"] == "simulator_failed" or has_no_reply(dialogue.get("error", "")):
            dialogue["ended"] = ""
            del dialogue["error"]

    # batches and seeds follow from the numbers of the dialogues, so a resumed run repeats an unbroken one
    batch_size = len(dialogues)
    if not args.model_url and not wants_vllm(args.rollout):
        batch_size = args.batch_size

    for turn in range(setting["turns"]):
        if all(dialogue["ended"] for dialogue in dialogues):
            break
        for first in range(0, len(dialogues), batch_size):
            due = {}
            for number, dialogue in enumerate(dialogues[first : first + batch_size], first):
                if not dialogue["ended"] and simulated_user.count_replies(dialogue) == turn:
                    due[number] = dialogue
            if due:
                model_turns(args, due, turn, generate)
                write_jsonl(path, dialogues)
        simulated_user.user_turns(dialogues, setting, user)
        write_jsonl(path, dialogues)

        n_going_on = sum(not dialogue["ended"] for dialogue in dialogues)
        print(f"turn {turn + 1}: {n_going_on} of {len(dialogues)} dialogues go on", flush=True)
    return dialogues


def model_turns(args: Args, due: dict[int, dict], turn: int, generate: Callable) -> None:
    """Adds the model's turn to the dialogues in `due`, which are keyed by their number in the file of
    profiles."""
    seeds = [(args.seed * 1_000_003 + number) * 1009 + turn for number in due]
    conversations = []
    for dialogue in due.values():
        messages = simulated_user.chat_messages(dialogue, args.ask_thinking, args.keep_thinking)
        conversations.append(messages)
    for dialogue, reply in zip(due.values(), generate(conversations, seeds), strict=True):
        if isinstance(reply, str):
            dialogue["ended"] = "too_long"
            dialogue["error"] = reply
            continue
        text, finished, n_tokens = reply
        shared.check_plain(args, text)
        simulated_user.add_model_turn(
            dialogue,
            args.setting,
            shared.whole_turn(args, text, finished),
            shared.think_format(args),
            finished,
            shared.split_answer,
            shared.answer_shows_response,
        )
        dialogue["history"][-1]["n_tokens"] = n_tokens


# --- 4. the simulators


def simulators(args: Args) -> dict[str, tuple[str, str, str]]:
    """Returns flag, name and URL of each simulator, by the suffix of its files."""
    named = {"": ("--simulator", args.simulator, args.simulator_url)}
    if args.held_out_simulator:
        held_out = ("--held-out-simulator", args.held_out_simulator, args.held_out_simulator_url)
        named["_held_out"] = held_out
    return named


def fingerprint(args: Args, simulator: str, profiles: list[dict]) -> str:
    """Hashes what two comparable scores share: setting, simulator (of a program its file too), prompts,
    profiles."""
    contents = [
        args.setting | {"seed": 0},
        simulator,
        user_prompts.SYSTEM,
        user_prompts.ASK_THINKING,
        user_prompts.PLANNER,
        user_prompts.SPEAKER,
        list(user_prompts.RULES.values()),
        profiles,
        *shared.digests_of_judge(simulator),
        *args.omit,
    ]
    return shared.short_hash(json.dumps(contents))


# --- 5. the run


def check(args: Args) -> list[dict]:
    """Returns the profiles; exits with 2 if the run could not end well."""
    shared.require(
        args,
        model="the model to evaluate; or name stored dialogues by --from-dialogues",
        profiles="the users, see data/README.md",
        simulator="a model's name at --simulator-url, or file.py:function",
    )
    sentient.check_judge(args)
    use_trained_context(args)
    profiles = simulated_user.read_profiles(args.profiles)[: args.limit or None]
    shared.check_model(args)
    dialogues = [simulated_user.start(profile, args.setting) for profile in profiles]
    # the first prompts must leave room for a reply
    shared.check_prompts(args, [simulated_user.chat_messages(d, args.ask_thinking) for d in dialogues])
    return profiles


def use_trained_context(args: Args) -> None:
    """Turns on what the model was trained with: keep_thinking and ask_thinking."""
    if shared.is_chat(args):
        return
    trained_as = read_trained_as(args.model)
    for name in ("keep_thinking", "ask_thinking"):
        if trained_as.get(name) and not getattr(args, name):
            setattr(args, name, True)
            print(f"{args.model} was trained with {name}: so it is evaluated")


def main(args: Args) -> None:
    if args.from_dialogues:
        rescore(args)
        return

    # --- data, simulators and judge, checked before anything is loaded or asked
    profiles = check(args)
    run = Run(args, "eval_sentient", args.model, args.setting)
    dialogue = simulated_user.start_with_answer(profiles[0], args.setting)
    users = {}
    for suffix, (flag, name, url) in simulators(args).items():
        store = run.folder / f"simulator{suffix}.jsonl"
        users[suffix] = simulated_user.load_user(name, url, store, args)
        simulated_user.try_user(users[suffix], flag, dialogue, args.setting, len(profiles), args)
    shared.try_judge(args, run.folder, [sentient.strategy_request(args, dialogue)])
    if args.dry_run:
        return
    run.start(has_steps=False)

    # --- talk with each simulator
    dialogues = {}
    with load_model(args, run.folder) as generate:
        for suffix, user in users.items():
            path = run.folder / f"dialogues{suffix}.jsonl"
            dialogues[suffix] = talk(args, profiles, user, generate, path)

    # --- score, judge; the model is freed by now, as a local judge needs its memory
    summary = {"model": args.model, "protocol": args.protocol, "setting": args.setting}
    index = []
    for suffix, (flag, name, _) in simulators(args).items():
        result = {"name": name, "fingerprint": fingerprint(args, name, profiles)}
        # after an outage there is no score: --resume asks the simulator again
        errors = [dialogue.get("error", "") for dialogue in dialogues[suffix]]
        shared.check_answered(args, errors, f"dialogues with {flag} {name}")
        result |= sentient.score(args, dialogues[suffix])
        if args.judge:
            result |= sentient.judge(args, dialogues[suffix], run.folder, suffix)
        summary[f"simulator{suffix}"] = for_summary(result)
        for metric, interval in METRICS.items():
            row = index_row(args, f"sentient{suffix}", result, metric, result["fingerprint"], interval)
            index.append(row | {"judge": result["name"]})
    shared.save_results(run, summary, index)


if __name__ == "__main__":
    main(parse_args(Args, {}))
