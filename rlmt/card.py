"""Writes the model card of a run: README.md in its model/ folder, from what the run's folder holds.

Tells what the model was made of and how. Benchmark scores are not in it, as the evaluations come later.
"""

import json
import re
import shlex
import zlib
from pathlib import Path

from rlmt.chat import read_trained_as
from rlmt.data import FILE_TYPES, read_log, write_file
from utils import THINK_FORMATS

ALGORITHMS = {  # the script's name in config.json: algorithm and file
    "sft": ("supervised fine-tuning", "train_sft_warmstart.py"),
    "reward": ("Bradley-Terry reward model", "train_reward.py"),
    "grpo": ("GRPO", "train_grpo.py"),
    "ppo": ("PPO", "train_ppo.py"),
    "dpo": ("DPO in rounds", "train_dpo.py"),
    "rlver": ("RLVER", "train_rlver.py"),
}
# arguments that name what is trained on; DPO reads the first of them that is given
DATA = ("pairs", "completions", "traces", "prompts", "profiles")
SETTINGS = ("rewards", "judge", "simulator", "learning_rate", "optim", "lora_r", "load_in_4bit", "seed")
METRICS = (  # keys of metrics.jsonl
    "loss",
    "accuracy",
    "mean_token_accuracy",
    "reward",
    "reward/preference",
    "reward/emotion",
    "reward/gold",
    "kl",
    "think/format_ok",
    "think/truncated",
    "think/mean_tokens",
    "think/response_tokens",
)

LICENCE = """No licence is stated here. The terms of the base model, of the data, and of the teacher or reward model \
apply to this model. Write yours into `license:` at the top before you publish it."""


def write_card(run: Path) -> None:
    """Writes the card of a finished run; one that somebody has written or changed stays as it is."""
    path = run / "model" / "README.md"
    if path.exists() and not is_unchanged(path.read_text()):
        return
    body = build(run)
    write_file(path, f"{body}\n<!-- generated {zlib.crc32(body.encode())}; a changed card is kept -->\n")


def is_unchanged(text: str) -> bool:
    """Tells whether a card is as `write` wrote it."""
    match = re.search(r"\n<!-- generated (\d+);[^\n]*\n$", text)
    return match is not None and int(match[1]) == zlib.crc32(text[: match.start()].encode())


def build(run: Path) -> str:
    """Returns the card's text."""
    config = json.loads((run / "config.json").read_text())
    args = config["args"]
    algorithm, file = ALGORITHMS[config["script"]]
    models = lineage(run)
    layout = layout_of(run / "model")
    rows = {
        "base model": f"`{models[-1]}`",
        "trained from": " from ".join(f"`{model}`" for model in models),
        "algorithm": f"{algorithm}, `{file}`",
    }
    data = next(name for name in DATA if args.get(name))
    rows[data] = shown(args[data])
    if uses_reward_model(args, data):
        rows["reward model"] = f"{shown(args['reward_model'])}, reads {args['reward_on']}"
    for name in SETTINGS:
        if args.get(name):
            rows[name] = shown(args[name])
    if layout:
        rows["think format"] = f"`{layout!r}`, z thinking, y response"

    parts = [
        front_matter(config["script"], models[-1], args[data]),
        f"# {run.name}",
        table(rows),
        f"## Command\n\n```bash\n{commands(run)}\n```\n\nProcesses: {config['processes']}",
        f"## Metrics of the training\n\n{metrics(run)}",
        f"## Use\n\n{use(layout)}",
        f"## Licence\n\n{LICENCE}",
    ]
    return "\n\n".join(parts) + "\n"


def shown(value) -> str:
    """Returns an argument as it is typed, in Markdown."""
    words = value if isinstance(value, list) else [value]
    return f"`{' '.join(map(str, words))}`"


def uses_reward_model(args: dict, data: str) -> bool:
    """Tells whether a reward model scored the completions."""
    if "reward_model" not in args or data in ("pairs", "completions"):
        return False
    return any(word.startswith("preference") for word in args.get("rewards", ["preference"]))


def lineage(run: Path) -> list[str]:
    """Lists the model that a run started from, then the one from which that was trained, down to the base model."""
    models = []
    while (run / "config.json").exists():
        config = json.loads((run / "config.json").read_text())
        if "args" not in config:  # the config of a model, in whose folder another one lies
            break
        models.append(config["args"]["model"])
        run = Path(models[-1]).parent
    return models


def layout_of(model: Path) -> str:
    """Returns how the model writes thinking and response; "" for a reward model."""
    name = read_trained_as(str(model)).get("think_format")
    if name is None:
        return ""
    return THINK_FORMATS[name].layout


def is_hub_name(text: str) -> bool:
    """Tells whether an argument names a model or data set of the hub, rather than a file or folder."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", text)) and not Path(text).exists()


def front_matter(script: str, base: str, data: str) -> str:
    """Returns the block in YAML that the hub reads."""
    task = "text-classification" if script == "reward" else "text-generation"
    lines = ["library_name: transformers", f"pipeline_tag: {task}", f"tags:\n- rlmt\n- {script}"]
    if is_hub_name(base):
        lines.append(f"base_model: {base}")
    data_set = data.partition(":")[0]  # without its configuration and split
    if is_hub_name(data_set) and not data_set.endswith(FILE_TYPES):
        lines.append(f"datasets:\n- {data_set}")
    return "\n".join(["---", *lines, "---"])


def table(rows: dict[str, str]) -> str:
    """Returns a Markdown table of names and values."""
    lines = ["| | |", "|---|---|"]
    for name, value in rows.items():
        lines.append("| {} | {} |".format(name, value.replace("|", "\\|")))
    return "\n".join(lines)


def commands(run: Path) -> str:
    """Returns the commands of all starts of a run, each once, without the path of this machine's Python."""
    found = []
    for line in (run / "command.txt").read_text().splitlines():
        command = shlex.join(["python", *shlex.split(line)[1:]])
        if command not in found:
            found.append(command)
    return "\n".join(found)


def metrics(run: Path) -> str:
    """Returns the last step's line of metrics.jsonl, held-out gold, and a reward model's held-out accuracy."""
    log = read_log(run / "metrics.jsonl")
    rows = {}
    if log:
        rows["step"] = str(log[-1]["step"])
        for name in METRICS:
            value = log[-1].get(name)
            if value is not None:
                rows[name] = f"{value:.4g}"
    held_out = read_log(run / "held_out.jsonl")
    if held_out:
        for name, value in held_out[-1].items():
            if isinstance(value, int | float):
                rows[f"held out: {name}"] = f"{value:.4g}"
    summary = json.loads((run / "summary.json").read_text())
    for name in ("accuracy", "ece", "n"):
        if name in summary.get("held_out", {}):
            rows[f"held out: {name}"] = f"{summary['held_out'][name]:.4g}"
    return f"{table(rows)}\n\nThese are numbers of the last training step, not scores of a benchmark."


def use(layout: str) -> str:
    """Returns how to load the model."""
    if not layout:
        return "`AutoModelForSequenceClassification`; the one output is the reward of the conversation."
    return (
        "`vllm serve` or `AutoModelForCausalLM`, with the tokenizer's chat template. "
        "generation_config.json has the ids at which an answer ends, think_format.json the format."
    )
