"""Times these scripts against TRL's trainers, or against another checkout of this repository.

    python -m dev.bench                                      # all cases; on two CPU cores about an hour
    python -m dev.bench --cases sft --pairs 6
    python -m dev.bench --cases grpo sft --old ../before     # against another checkout

| case | ours | TRL 1.16 |
|---|---|---|
| grpo | train_grpo.py with vLLM and a reward model | GRPOTrainer with the same vLLM and reward model |
| sft | train_sft_warmstart.py | SFTTrainer |
| dpo | train_dpo.py --pairs | DPOTrainer |

Both sides do the same work: the same model with random weights, the same rows and, in float32 on a CPU, the
same completions. Therefore two of TRL's defaults are changed: GRPOTrainer makes no importance correction,
and DPOTrainer runs the reference once. `largest_difference` and `same_tokens` in a result show whether the
logs of both sides agree. With --old both checkouts must know the flags of `Case.our_command`.

Each side runs in a process of its own, in turn, `--pairs` times, and its seconds are read from the
metrics.jsonl that it writes. The first step warms up and does not count. A pair of runs gives one ratio of
seconds per token, other / ours. On a GPU the peak memory is the largest use of the card that nvidia-smi
showed, with vLLM's reserve; on a CPU it is the largest resident set of the process.
"""

import functools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that vLLM reads, for both sides
import rlmt  # noqa: F401
import pandas as pd
import torch
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)

from utils import DEVICE, DTYPE, SAFE

ROOT = str(Path(__file__).parents[1])
ON_GPU = DEVICE == "cuda"
ANSWERS = {"grpo": [], "sft": ["completion"], "dpo": ["chosen", "rejected"]}  # fields of the rows of a case
MAX_PROMPT = 64  # tokens
GROUP_SIZE = 4
RATE = 1e-6
WARMUP = 0.1  # share of the steps
MEASURED = ["seconds_per_step", "peak_gib"]
SPREAD = ["median", "min", "max"]
# of a LlamaConfig
SHAPE = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
# SHAPE's numbers; rows of a step; rows that TRL reads at once; tokens of the longest completion
SIZES = {
    "tiny": ((2048, 128, 352, 4, 4, 4), 16, 4, 48),
    "cpu": ((8192, 256, 704, 6, 4, 4), 64, 4, 512),
    "1.5b": ((151936, 1536, 8960, 28, 12, 2), 128, 2, 4096),
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
HEAD = """\
| case | device | other | seconds per step: ours | other | ratio | GiB: ours | other | difference | commit |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass
class Args:
    cases: tuple[Literal[tuple(ANSWERS)], ...] = tuple(ANSWERS)
    """Which cases."""
    size: Literal[tuple(SIZES)] = "1.5b" if ON_GPU else "cpu"
    """Size of the models and rows. tiny shows that a case runs; its figures mean nothing."""
    steps: int = 3
    """Measured steps of a run."""
    pairs: int = 3
    """How often each side runs."""
    old: str = ""
    """Folder of another checkout of this repository, to compare with in place of TRL."""
    out: Path = Path("results/bench")
    """Folder for <case>-<size>-<peer>__<device>.json and table.md."""


@dataclass
class Case:
    """Holds the work of both sides; the last four are those of SIZES."""

    name: str
    folder: str
    """For policy/, reward/, rows.jsonl and the runs."""
    steps: int
    """The first one warms up."""
    shape: tuple
    n_rows: int
    """Rows of a step; in GRPO its completions."""
    batch: int
    """Rows that TRL reads at once. We read as many tokens as that many of the longest completions have."""
    longest: int

    # --- 1. models and rows

    @torch.no_grad()
    def make(self) -> None:
        """Writes policy/, reward/ and rows.jsonl: random weights and words, the same at every call.

        The vocabulary consists of words, so a text has as many tokens for the reward model as for the policy.
        """
        config = LlamaConfig(
            **dict(zip(SHAPE.split(), self.shape)),
            max_position_embeddings=MAX_PROMPT + self.longest,
            num_labels=1,
            pad_token_id=0,
            eos_token_id=1,
        )
        config.initializer_range = 3 / config.hidden_size
        words = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
        words += [f"w{i}" for i in range(4, config.vocab_size)]
        ids = dict(zip(words, range(config.vocab_size)))
        # our check of the template reads other words
        backend = Tokenizer(models.WordLevel(ids, unk_token=words[-1]))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token=words[0], eos_token=words[1], chat_template=CHAT_TEMPLATE
        )
        set_seed(0)
        policy = LlamaForCausalLM(config)
        # The end of turn is about equally likely after every token, and half of all completions reach a
        # seventh of the longest, so that they have a long tail, like real ones. The LM head reads the end
        # from the first number of the residual stream. It is so large that after the final norm it is about
        # the root of the width.
        policy.model.embed_tokens.weight[:, 0] = 6.0
        logit = math.log(config.vocab_size * math.log(2) * 7 / self.longest)
        policy.lm_head.weight[1] = 0
        policy.lm_head.weight[1, 0] = logit / math.sqrt(config.hidden_size)
        for name, model in {"policy": policy, "reward": LlamaForSequenceClassification(config)}.items():
            model.save_pretrained(f"{self.folder}/{name}")
            tokenizer.save_pretrained(f"{self.folder}/{name}")

        def turn(role: str, n_words: float) -> list[dict]:
            return [{"role": role, "content": " ".join(random.choices(words[4:], k=int(n_words)))}]

        rows = []
        for i in range(self.n_rows):
            row = {"id": str(i), "prompt": turn("user", 24 + i % 17)}
            for field in ANSWERS[self.name]:
                row[field] = turn("assistant", self.longest ** random.random())
            rows.append(row)
        pd.DataFrame(rows).to_json(f"{self.folder}/rows.jsonl", orient="records", lines=True)

    # --- 2. both sides

    def our_command(self, out: str) -> list[str]:
        """Returns the command of our script, without the interpreter."""
        rows = f"{self.folder}/rows.jsonl"
        lengths = f"--max-prompt-tokens {MAX_PROMPT} --max-completion-tokens {self.longest}"
        tuning = f"--batch-size {self.n_rows} --epochs {self.steps} --warmup-ratio {WARMUP}"
        commands = {
            "sft": f"train_sft_warmstart.py --traces {rows} {tuning} "
            f"--max-length {MAX_PROMPT + self.longest}",
            "dpo": f"train_dpo.py --pairs {rows} {lengths} {tuning}",
            "grpo": f"train_grpo.py --prompts {rows} {lengths} --steps {self.steps} "
            f"--prompts-per-step {self.n_rows // GROUP_SIZE} --group-size {GROUP_SIZE} --temperature 1.0 "
            f"--reward-model {self.folder}/reward --on-bad-format score --rollout vllm --vllm-memory 0.3",
        }
        return (
            f"{commands[self.name]} --model {self.folder}/policy --think-format plain --learning-rate {RATE} "
            f"--weight-decay 0 --micro-batch-tokens {self.batch * self.longest} --out {out}"
        ).split()

    def run_peer(self, ours: str, out: str) -> None:
        """Trains with TRL, and with its defaults where the work does not fix a value.

        GRPOTrainer gets the prompts in the order of our run in `ours`.
        """
        # here: they take seconds to load; trl loads each of its names when it is asked for
        import trl
        from datasets import Dataset

        rows = Dataset.from_json(f"{self.folder}/rows.jsonl", cache_dir=out)
        options = {
            "warmup_steps": WARMUP,
            "lr_scheduler_type": "cosine",
            "adam_beta2": 0.95,
            "max_length": None,
        }
        reward = {}
        if self.name == "dpo":
            options["precompute_ref_log_probs"] = True
        if self.name == "grpo":
            from trl.generation import vllm_generation

            # TRL has no argument for vLLM's dtype, which would be another one than the trainer's on a CPU
            vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=DTYPE)
            rows = rows.select(pd.read_json(f"{ours}/completions.jsonl", lines=True)["id"][::GROUP_SIZE])
            options = {
                "lr_scheduler_type": "constant",
                "shuffle_dataset": False,
                "num_generations": GROUP_SIZE,
                "max_completion_length": self.longest,
                "beta": 1e-3,
                "use_bias_correction_kl": False,
                "use_vllm": True,
                "vllm_importance_sampling_correction": False,
            }
            model = LlamaForSequenceClassification.from_pretrained(
                f"{self.folder}/reward", dtype=DTYPE, **SAFE
            )
            reward = {"reward_funcs": model}
        config = getattr(trl, f"{self.name.upper()}Config")(
            output_dir=out,
            max_steps=self.steps,
            learning_rate=RATE,
            per_device_train_batch_size=self.batch,
            gradient_accumulation_steps=self.n_rows // self.batch,
            model_init_kwargs={"dtype": "float32"},
            bf16=DTYPE == "bfloat16",
            logging_steps=1,
            save_strategy="no",
            **options,
        )
        trainer = getattr(trl, f"{self.name.upper()}Trainer")(
            f"{self.folder}/policy", args=config, train_dataset=rows, callbacks=[Clock()], **reward
        )
        if self.name == "grpo" and not ON_GPU:

            def sync_weights() -> None:
                """Gives vLLM the weights like our sampler does on a CPU, where TRL's way raises an error."""
                llm = trainer.vllm_generation.llm
                weights = ((name, weight.clone()) for name, weight in trainer.model.state_dict().items())
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                llm.reset_prefix_cache()

            trainer.vllm_generation.sync_weights = sync_weights
        trainer.train()
        log = pd.DataFrame(trainer.state.log_history[:-1])  # the last line is that of the whole training
        log.to_json(f"{out}/metrics.jsonl", orient="records", lines=True)


class Clock(TrainerCallback):
    """Logs seconds, and seeds every step like our loops, so that both sides sample the same completions."""

    def on_step_begin(self, args, state, control, **_):
        set_seed(state.global_step)

    def on_log(self, args, state, control, **_):
        state.log_history[-1]["seconds"] = time.monotonic()


# --- 3. pairs of runs and their ratios


def run_side(words: list[str], checkout: str) -> float:
    """Runs a command of Python and returns its peak memory in GiB; exits if it fails."""
    # what a script prints is in its logs; errors are seen
    process = subprocess.Popen([sys.executable, *words], cwd=checkout, stdout=subprocess.DEVNULL)
    query = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --id="
    ended = 0
    peak_gib = 0.0
    while not ended:
        if ON_GPU:
            used = subprocess.check_output((query + os.environ["CUDA_VISIBLE_DEVICES"]).split())
            peak_gib = max(peak_gib, float(used) / 1024)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG if ON_GPU else 0)
    if status:
        sys.exit(f"failed: {words}")
    return peak_gib or usage.ru_maxrss / 2**20  # from KiB


def read_steps(out: str, peak_gib: float) -> pd.DataFrame:
    """Reads the measured steps of a run from its metrics.jsonl, and writes its peak memory beside each."""
    # train_dpo.py logs its steps in a folder of the round
    *_, metrics = sorted(Path(out).rglob("metrics.jsonl"))
    log = pd.read_json(metrics, lines=True).select_dtypes("number")
    log["seconds_per_step"] = log["seconds"].diff()
    log["tokens"] = log["num_tokens"].diff()
    log["peak_gib"] = peak_gib
    return log[1:]


def compare(case: Case, pairs: int, old: str) -> dict:
    """Runs both sides in turn, `pairs` times, and returns what they took and how they compare."""
    logs = {}
    for pair in range(pairs):
        ours, other = f"{case.folder}/ours-{pair}", f"{case.folder}/other-{pair}"
        logs["ours", pair] = read_steps(ours, run_side(case.our_command(ours), ROOT))
        words = ["-c", f"from dev.bench import Case; {case}.run_peer({ours!r}, {other!r})"]
        if old:
            words = case.our_command(other)
        logs["other", pair] = read_steps(other, run_side(words, old or ROOT))
    steps = pd.concat(logs)
    runs = steps.groupby(level=[0, 1]).mean()
    result = {}
    for side in ("ours", "other"):
        result[side] = runs.loc[side][MEASURED].agg(SPREAD).to_dict()
    rate = runs["tokens"] / runs["seconds_per_step"]
    result["other / ours"] = (rate["ours"] / rate["other"]).agg(SPREAD).to_dict()
    difference = (steps.loc["ours"] - steps.loc["other"]).abs().max()
    # where tokens are the same, both sides should agree in these numbers
    result["largest_difference"] = difference.filter(["loss", "grad_norm", "reward"]).to_dict()
    result["same_tokens"] = bool(difference["tokens"] == 0)
    return result


def table(folder: Path) -> str:
    """Returns the results of a folder as a Markdown table."""
    text = HEAD
    for path in sorted(folder.glob("*.json")):
        about = json.loads(path.read_text())
        result = about["result"]
        ours, other, ratio = result["ours"], result["other"], result["other / ours"]
        differences = [f"{key} {value:.0e}" for key, value in result["largest_difference"].items()]
        text += (
            f"| {about['case']} | {about['device']} | {about['other']} "
            f"| {ours['seconds_per_step']['median']:.3g} | {other['seconds_per_step']['median']:.3g} "
            f"| **{ratio['median']:.2f}** ({ratio['min']:.2f} to {ratio['max']:.2f}) "
            f"| {ours['peak_gib']['max']:.2f} | {other['peak_gib']['max']:.2f} "
            f"| {', '.join(differences)} | {about['commit'][:7]} |\n"
        )
    return text


# --- 4. the command


def commit_of(checkout: str) -> str:
    """Returns the commit of a checkout, with + after it if files were changed."""
    git = "git describe --always --abbrev=40 --dirty=+ --exclude=*".split()
    return subprocess.check_output(git, cwd=checkout, text=True).strip()


def main(args: Args) -> None:
    # both sides get one card: of several, our scripts use the first, and TRL's Trainer would use all
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    about = {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": commit_of(ROOT),
        "other": "TRL",
        "device": f"CPU, {os.cpu_count()} cores",
    }
    if args.old:
        about["other"] = commit_of(args.old)[:7]
    if ON_GPU:
        about["device"] = torch.cuda.get_device_name()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, folder, args.steps + 1, *SIZES[args.size])
            case.make()
            result = compare(case, args.pairs, args.old)
        about |= {"case": f"{name}-{args.size}", "result": result}
        path = args.out / f"{about['case']}-{about['other']}__{DEVICE}.json"
        path.write_text(json.dumps(about, indent=1) + "\n")
    (args.out / "table.md").write_text(table(args.out))
    print(table(args.out))


if __name__ == "__main__":
    main(tyro.cli(Args))
