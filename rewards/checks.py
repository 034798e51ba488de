"""Checks the rewards of a run before a model is loaded."""

import inspect
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState

import rewards
from rlmt.data import check_ids, read_prompts
from rlmt.endpoint import Endpoint, call_timeout, try_endpoint
from rlmt.run import refuse_unused
from utils import fail, or_fail
from rewards import gold, preference, sandbox
from rewards.code_runner import read_tests
from rewards.command_line import asked_for, functions_of, is_preference_alone, parameters, parse_spec
from rewards.command_line import reward_options
from rewards.judged import read_rubric
from rewards.references import read_references
from rewards.shared import VERIFIERS, fields_of, has_field


def check(args) -> None:
    """Checks the rewards of `args` (of train_grpo.py or train_ppo.py).

    Prints how many prompts each reward applies to. Exits with 2 if something is wrong.
    """
    spec = or_fail(parse_spec, args.rewards)
    functions = functions_of(args)
    for name, function in functions.items():
        if name not in rewards.REWARDS:
            _check_signature(name, function)
    _check_values(or_fail(reward_options, args))
    _check_limits(or_fail(reward_options, args), args.max_completion_tokens)
    _refuse_what_the_floor_undoes(args, spec)

    asked = {name: asked_for(function) for name, function in functions.items()}
    judged_names = judged_rewards(args)
    _check_judge(args, judged_names)
    preference.check(args)
    gold.check(args)

    group_size = getattr(args, "group_size", 1)  # PPO samples one completion a prompt
    has_verifier = any(name in functions for name in VERIFIERS)
    fields = fields_of(or_fail(reward_options, args))  # pairwise against a reference is in it
    for name in asked:
        compares_a_group = "group_size" in asked[name] and name not in fields
        if compares_a_group and group_size == 1:
            fail(f"--rewards {name} compares the completions of one prompt; PPO has one of each")
        if "correct" in asked[name] and not has_verifier:
            fail(f"--rewards {name} needs to know what is right; add one of {', '.join(VERIFIERS)}")
    _check_pass_at_k(args, group_size, has_verifier)
    if not is_preference_alone(args, spec):
        _check_prompts(args, dict(spec), functions, judged_names)
    if "code" in functions:
        sandbox.check(args.unsafe_code)


def judged_rewards(args) -> list[str]:
    """Returns the names in `args.rewards` that ask a judge."""
    return [name for name, function in functions_of(args).items() if "judge" in asked_for(function)]


def judge_endpoint(args, run: Path) -> Endpoint:
    """Returns the client of --judge; exits with 2 if it cannot be asked, as without a key.

    A judge that may write a long reply, as one that thinks, gets more time for it.
    """
    options = or_fail(reward_options, args)
    longest_reply = max(options[name].get("judge_max_tokens", 0) for name in judged_rewards(args))
    return Endpoint(
        args.judge,
        run / "judge.jsonl",
        args.judge_url,
        timeout=call_timeout(longest_reply),
        budget=args.budget,
        price=args.price,
        key_env=args.key_env,
    )


def try_judges(args, run: Path) -> None:
    """Asks the judges of --rewards and --gold for one token each; exits with 2 if no reply comes.

    Call it before a model is loaded. `run`: the folder of their replies, whose cost counts in the budget.
    """
    if judged_rewards(args) and PartialState().is_main_process:
        try_endpoint(judge_endpoint(args, run), "--judge", args.dry_run)
    gold.try_judge(args, run)


def read_prompt_rows(args) -> list[dict]:
    """Reads the prompts with all fields of their rows, which the verifiers need; exits with 2 if ids repeat."""
    prompts = read_prompts(args.prompts)
    check_ids(args.prompts, prompts)
    return prompts


def _check_signature(name: str, function: Callable) -> None:
    """Exits with 2 if a user's reward cannot be called with rows and what it asks for of CONTEXT."""
    if not callable(function):
        fail(f"--rewards: {name} is of type {type(function).__name__}; it must be a function of rows")
    try:
        for parameter in parameters(function).values():
            if parameter.default is parameter.empty and parameter.name not in rewards.CONTEXT:
                fail(
                    f"--rewards: {name} has a parameter {parameter.name!r} without a default. Give it one, "
                    "which makes it an option of --reward-args; "
                    f"only {', '.join(rewards.CONTEXT)} need none"
                )
        inspect.signature(function).bind([], **dict.fromkeys(asked_for(function)))
    except (TypeError, ValueError) as e:
        fail(f"--rewards: {name} must take rows as its first parameter ({e})")


def _check_values(options: dict[str, dict]) -> None:
    """Exits with 2 if a verifier's value for what is right is not above the 0 for what is wrong."""
    for name in VERIFIERS:
        if name in options and options[name].get("value", 1.0) <= 0:
            fail(
                f"--reward-args {name}.value must be above 0; "
                f"to punish what is right, give {name} a weight below 0"
            )


def _check_limits(options: dict[str, dict], max_tokens: int) -> None:
    """Exits with 2 if an option has a number with which its reward cannot be computed, or means nothing."""
    for place in ("code.workers", "repetition.n"):
        name, _, option = place.partition(".")
        if name in options and options[name][option] < 1:
            fail(f"--reward-args {place} must be 1 or more, not {options[name][option]}")
    if "pairwise" in options and options["pairwise"]["opponents"] < 0:
        fail("--reward-args pairwise.opponents must be 0 (all others) or more")
    if "overlong" in options and not 0 <= options["overlong"]["buffer"] <= max_tokens:
        fail(
            f"--reward-args overlong.buffer must be from 0 (a quarter of the limit) to --max-completion-tokens "
            f"{max_tokens}, not {options['overlong']['buffer']}"
        )


def _refuse_what_the_floor_undoes(args, spec: list[tuple[str, float | str]]) -> None:
    """Exits with 2 if something is for completions that get a floor instead, and so changes no reward."""
    if args.on_bad_format != "floor":
        return
    without_effect = [f"--reward-args {word}" for word in args.reward_args if _is_about_cut_off(word)]
    for name, rule in spec:
        if name == "format" and rule != 0:  # with the weight 0 it is only logged
            without_effect.append(f"--rewards {name}")
    if without_effect:
        fail(
            f"{without_effect[0]} does nothing with --on-bad-format floor, which puts a floor in place of all rewards "
            "of a completion that is malformed or cut off; add --on-bad-format score"
        )


def _is_about_cut_off(word: str) -> bool:
    """Tells whether a word of --reward-args sets the reward of a completion that was cut off."""
    place = word.partition("=")[0]
    return place.endswith(".no_eos") or place == "cosine.exceeded"


def _check_judge(args, judged_names: list[str]) -> None:
    """Exits with 2 if a reward lacks its judge, or if a flag of the judge would do nothing."""
    if not judged_names:
        reason = "without a reward that asks one"
        refuse_unused({"--judge": reason, "--judge-url": reason})
    if not judged_names and not args.gold.startswith("judge:"):
        reason = "without a judge"
        has_server = getattr(args, "vllm_server_url", "")
        refuse_unused({"--budget": reason, "--price": reason, "--key-env": "" if has_server else reason})
    if judged_names and not args.judge:
        fail(f"--rewards {judged_names[0]} asks a judge; give --judge, and --judge-url")
    if judged_names:
        judge_endpoint(args, Path())  # exits with 2 without a key


def _check_pass_at_k(args, group_size: int, has_verifier: bool) -> None:
    k = getattr(args, "pass_at_k", 0)
    if not k:
        return
    if not 1 <= k <= group_size:
        fail(f"--pass-at-k {k} must be from 1 to --group-size {group_size}")
    if not has_verifier:
        fail(f"--pass-at-k needs to know what is right; add one of {', '.join(VERIFIERS)} to --rewards")


def _check_instructions(prompts: list[dict]) -> None:
    """Exits with 2 if NLTK's data is missing, or a prompt has an instruction that no checker knows."""
    from benchmarks import ifbench, ifeval  # their checkers take seconds to import

    of_ifbench = []
    of_ifeval = []
    for prompt in prompts:
        names = prompt.get("instruction_id_list")
        if not names:
            continue
        task = {"key": prompt["id"]} | prompt
        if ifbench.CHECKERS.keys() >= set(names):
            of_ifbench.append(task)
        else:
            of_ifeval.append(task)
    if of_ifbench:
        ifeval.check_ifbench(of_ifbench)
    if of_ifeval:
        ifeval.check_ifeval(of_ifeval)


def _check_prompts(
    args, rules: dict[str, float | str], functions: dict[str, Callable], judged_names: list[str]
) -> None:
    """Prints each reward's rule and options, and to how many prompts it applies; exits with 2 if that is none."""
    prompts = read_prompt_rows(args)
    if "instructions" in functions:
        _check_instructions(prompts)
    for prompt in prompts:
        if "code" in functions and has_field(prompt, "tests"):
            or_fail(read_tests, prompt)
        if "rubric" in functions and has_field(prompt, "rubric"):
            or_fail(read_rubric, prompt)
        if "bleu" in functions and has_field(prompt, "references"):
            or_fail(read_references, prompt)
    options = rewards.reward_options(args)
    fields = fields_of(options)
    for name in functions:
        n_prompts = len(prompts)
        if name in fields:
            field = fields[name]
            n_prompts = sum(has_field(prompt, field) for prompt in prompts)
            if n_prompts == 0:
                fail(f"--rewards {name}: no row of {args.prompts} has the field {field!r}")
        calls = ""
        if name == "pairwise":
            n_calls = _calls_of_games(getattr(args, "group_size", 1), **options[name])
            calls = f", at most {n_calls} calls a prompt"
        elif name in judged_names:
            calls = ", one call a completion"
        rule = rules[name] if isinstance(rules[name], str) else f"weight {rules[name]:g}"
        given = "".join(f", {option}={value!r}" for option, value in options[name].items())
        PartialState().print(
            f"reward {name}: {rule}{given}; applies to {n_prompts} of {len(prompts)} prompts{calls}"
        )


def _calls_of_games(group_size: int, opponents: int, against: str, **_) -> int:
    """Returns how many calls `pairwise` makes for a prompt; two rows that play each other share both games."""
    if against == "reference":
        return 2 * group_size
    every_pair = group_size * (group_size - 1)
    if opponents == 0:
        return every_pair
    return min(every_pair, 2 * opponents * group_size)
