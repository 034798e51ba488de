"""Evaluates on SAGE's Sentient benchmark: in which emotion does a simulated user leave the conversation?

    python eval_sentient.py --model results/rlver/model --profiles simulator_profile_withfirsttalk.jsonl \\
        --simulator deepseek-chat --simulator-url https://ENDPOINT/v1 --held-out-simulator gpt-4o-2024-08-06
    python eval_sentient.py --from-dialogues dialogues.jsonl.gz --out score.json     # no model, no simulator
    python eval_sentient.py --from-dialogues dialogues.jsonl.gz --out score.json --judge deepseek-chat \\
        --judge-url https://ENDPOINT/v1                                              # what the replies did

Reports `mean_emotion` of the last turns (the Sentient score), `success` (dialogues that end at 100) and
`failure` (below 10). rlver/simulated_user.py says how a user works. A simulator is a model at an
OpenAI-compatible endpoint, or file.py:function (dialogue, setting) -> (utterance, change), such as
rlver/toy_users.py:user.

Use a second simulator: a policy can learn to please the one that it was trained with, for instance by praise.
--held-out-simulator gets conversations and a score of its own.

`--protocol sage` (default) and `rlver` (its training runs); --start, --low and --turns change single values,
all others are in rlver/simulated_user.py:

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
from 1 to 5; their instructions can be read from a file, --template), see rlver/sentient.py. A judge
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import context_length, encode_prompt, load_config, read_trained_as
from rlmt.data import read_log, write_jsonl
from rlmt.endpoint import check_answered, has_no_reply
from rlmt.run import Run, inputs_of, parse_args
from rlmt.sampler import Sampling, text_of
from rlmt.saved import saved_sampler
from rlmt.scorers import Who, read_who
from benchmarks import shared
from benchmarks.flags import JudgeFlags, ModelFlags
from benchmarks.scoring import for_summary, index_row
from benchmarks.tested_model import Answer, TestedModel
from rlver import prompts, sentient, simulated_user
from utils import ASK_THINKING, fail, wants_vllm

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
        changes = {"start": self.start, "low": self.low, "turns": self.turns}
        changes |= {"kind": self.user, "seed": self.seed}
        known = {name: value for name, value in changes.items() if value is not None}
        return simulated_user.PROTOCOLS[self.protocol] | known


# --- 1. stored dialogues


def rescore(args: Args) -> None:
    """Scores the dialogues of --from-dialogues into the file --out."""
    if not args.out:
        fail("--from-dialogues needs --out OUT.json")
    shared.check_stored(args, "from_dialogues", *(field.name for field in fields(JudgeFlags)))
    judge = sentient.DialogueJudge(args)
    dialogues = sentient.read_dialogues(args.from_dialogues)
    scores = for_summary(sentient.score(dialogues, args.seed, args.max_invalid))
    scores["from"] = args.from_dialogues
    out = Path(args.out)
    if args.dry_run:
        judge.try_first(out.parent, [judge.strategy_request(dialogues[0])], sentient.read_strategies)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    scores |= judge.judge(dialogues, out.parent, f"_{out.stem}")
    shared.write_scores(args.out, scores)
    print(json.dumps(scores))


# --- 2. the tested model


class Partner(TestedModel):
    """Takes the tested model's turns in dialogues."""

    def __init__(self, args: Args):
        """Turns on what the model was trained with: keep_thinking and ask_thinking; config.json has them.

        Exits with 2 if --model cannot generate.
        """
        super().__init__(args)
        self.temperature = args.temperature
        self.check()
        if not self.is_chat:
            trained_as = read_trained_as(self.name)
            args.keep_thinking |= trained_as.get("keep_thinking", False)
            args.ask_thinking |= trained_as.get("ask_thinking", False)
            print(f"{self.name}: keep_thinking {args.keep_thinking}, ask_thinking {args.ask_thinking}")
        self.ask_thinking = args.ask_thinking
        self.keep_thinking = args.keep_thinking
        self.batch_size = 0
        """Dialogues that transformers samples together; 0: all of them."""
        if not args.model_url and not wants_vllm(args.rollout):
            self.batch_size = args.batch_size

    @contextmanager
    def load(self, run: Path) -> Iterator[None]:
        """Loads a model that gets token ids, and frees its memory at the end. The folder `run` gets logs and
        replies."""
        self.run = run
        if self.is_chat:
            yield
            return
        sampling = Sampling(self.temperature, self.max_tokens, self.top_p, self.stop)
        context = context_length(load_config(self.name))
        self.max_prompt_tokens = context - self.max_tokens
        log = run / "vllm.log"
        with saved_sampler(
            self.name, self.tokenizer, sampling, context, log=log, **self.of_sampler
        ) as self.sampler:
            yield

    def messages(self, dialogue: dict) -> list[dict]:
        """Returns what the model reads of a dialogue."""
        return simulated_user.chat_messages(dialogue, self.ask_thinking, self.keep_thinking)

    def continue_all(self, conversations: list[list[dict]], seeds: list[int]) -> list[Answer]:
        """Returns the model's reply to each conversation."""
        if self.is_chat:
            return self.ask(conversations, seeds, self.temperature, self.run)
        prompt_ids = [encode_prompt(self.tokenizer, messages) for messages in conversations]
        fitting = [i for i, ids in enumerate(prompt_ids) if len(ids) <= self.max_prompt_tokens]
        answers: list[Answer] = ["no room for a reply in the model's context"] * len(prompt_ids)
        samples = self.sampler.sample([prompt_ids[i] for i in fitting], [seeds[i] for i in fitting])
        for n, sample in samples:
            answers[fitting[n]] = (text_of(self.tokenizer, sample), sample.finished, len(sample.ids))
        return answers

    def reply(self, dialogues: dict[int, dict], setting: dict) -> None:
        """Adds the model's turn to dialogues, which are keyed by their number in the file of profiles; ends
        those that it cannot answer."""
        seeds = []
        for number, dialogue in dialogues.items():
            turn = simulated_user.count_replies(dialogue)
            seeds.append((self.seed * 1_000_003 + number) * 1009 + turn)
        answers = self.continue_all(list(map(self.messages, dialogues.values())), seeds)
        for dialogue, answer in zip(dialogues.values(), answers, strict=True):
            if isinstance(answer, str):
                dialogue["ended"] = "too_long"
                dialogue["error"] = answer
                continue
            text, finished, n_tokens = answer
            self.check_plain(text)
            simulated_user.add_model_turn(
                dialogue,
                setting,
                self.whole_turn(text, finished),
                self.think_format,
                finished,
            )
            dialogue["history"][-1]["n_tokens"] = n_tokens


# --- 3. the dialogues


def talk(
    profiles: list[dict], setting: dict, user: simulated_user.User, model: Partner, path: Path
) -> list[dict]:
    """Holds the dialogues of all profiles with one simulator.

    `path` gets them after every turn. If the file exists, goes on from there, and asks a simulator that failed
    again, and a model that gave no reply.
    """
    dialogues = read_log(path) or [simulated_user.start(profile, setting) for profile in profiles]
    for dialogue in dialogues:
        if dialogue["ended"] == "simulator_failed" or has_no_reply(dialogue.get("error", "")):
            dialogue["ended"] = ""
            del dialogue["error"]
    # batches and seeds follow from the numbers of the dialogues, so a resumed run repeats an unbroken one
    batch_size = model.batch_size or len(dialogues)
    for numbers in simulated_user.converse(dialogues, setting, user):
        print(f"{len(numbers)} of {len(dialogues)} dialogues go on", flush=True)
        write_jsonl(path, dialogues)
        for first in range(0, len(dialogues), batch_size):
            batch = {n: dialogues[n] for n in numbers if first <= n < first + batch_size}
            if batch:
                model.reply(batch, setting)
                write_jsonl(path, dialogues)
    write_jsonl(path, dialogues)
    return dialogues


def fingerprint(setting: dict, simulator: Who, profiles: list[dict], omit: tuple[str, ...]) -> str:
    """Hashes what two comparable scores share: setting, simulator (of a function its file too), prompts,
    profiles."""
    contents = [
        setting | {"seed": 0},
        simulator.name,
        prompts.SYSTEM,
        ASK_THINKING,
        prompts.PLANNER,
        prompts.SPEAKER,
        list(prompts.RULES.values()),
        profiles,
    ]
    if simulator.kind == "function":
        contents += inputs_of(simulator.name).values()
    return shared.short_hash(json.dumps([*contents, *omit]))


# --- 4. the run


def main(args: Args) -> None:
    if args.from_dialogues:
        rescore(args)
        return

    # --- data, model, simulators and judge, checked before anything is loaded or asked
    shared.require(
        model=(args.model, "the model to evaluate; or name stored dialogues by --from-dialogues"),
        profiles=(args.profiles, "the users, see data/README.md"),
        simulator=(args.simulator, "a model's name at --simulator-url, or file.py:function"),
    )
    judge = sentient.DialogueJudge(args)
    setting = args.setting
    profiles = simulated_user.read_profiles(args.profiles)[: args.limit or None]
    model = Partner(args)
    # the first prompts must leave room for a reply
    starts = [simulated_user.start(profile, setting) for profile in profiles]
    model.encode_prompts(list(map(model.messages, starts)))
    run = Run(args, "eval_sentient", args.model, setting)
    # by the suffix of their files
    simulators = {"": ("--simulator", read_who(args.simulator, args.simulator_url))}
    if args.held_out_simulator:
        who = read_who(args.held_out_simulator, args.held_out_simulator_url)
        simulators["_held_out"] = ("--held-out-simulator", who)
    dialogue = simulated_user.start_with_answer(profiles[0], setting)
    request = simulated_user.planner_request(dialogue, setting)
    users = {}
    for suffix, (flag, who) in simulators.items():
        store = run.folder / f"simulator{suffix}.jsonl"
        user = users[suffix] = simulated_user.load_user(flag, who, store, args)
        simulated_user.try_user(flag, user, request, len(profiles) * setting["turns"])
    judge.try_first(run.folder, [judge.strategy_request(dialogue)], sentient.read_strategies)
    if args.dry_run:
        return
    run.start(has_steps=False)

    # --- talk with each simulator
    dialogues = {}
    with model.load(run.folder):
        for suffix, user in users.items():
            path = run.folder / f"dialogues{suffix}.jsonl"
            dialogues[suffix] = talk(profiles, setting, user, model, path)

    # --- score, judge; the model is freed by now, as a local judge needs its memory
    summary = {"model": args.model, "protocol": args.protocol, "setting": setting}
    index = []
    for suffix, (flag, who) in simulators.items():
        result = {"name": who.name, "fingerprint": fingerprint(setting, who, profiles, args.omit)}
        # after an outage there is no score: --resume asks the simulator again
        errors = [dialogue.get("error", "") for dialogue in dialogues[suffix]]
        check_answered(errors, f"dialogues with {flag} {who.name}", args.max_invalid)
        result |= sentient.score(dialogues[suffix], args.seed, args.max_invalid)
        result |= judge.judge(dialogues[suffix], run.folder, suffix)
        summary[f"simulator{suffix}"] = for_summary(result)
        for metric, interval in METRICS.items():
            row = index_row(f"sentient{suffix}", result, metric, result["fingerprint"], interval)
            about = {"model": args.model, "temperature": args.temperature, "judge": result["name"]}
            index.append(row | about)
    shared.save_results(run, summary, index)


if __name__ == "__main__":
    main(parse_args(Args, {}))
