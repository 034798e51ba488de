"""Times these scripts against what a user would run instead: the same work, whole runs in alternating pairs.

    python -m dev.bench                                     # all cases; on two CPU cores about an hour
    python -m dev.bench grpo sft --pairs 6
    python -m dev.bench grpo --against ../old-checkout      # the peer is another checkout of this repository

| case | ours | peer |
|---|---|---|
| grpo | train_grpo.py with vLLM | trl.GRPOTrainer with the same vLLM, as it is and lean (without importance correction) |
| sft | train_sft_warmstart.py | trl.SFTTrainer, padded batches |
| dpo | train_dpo.py --pairs | trl.DPOTrainer |
| reward | rewards.preference.RewardModel | one forward of all texts, padded to the longest, as GRPOTrainer scores |
| judge | endpoint.py | the limit: c calls in flight, each taking 0.2 s |

Each side is a process of its own that runs the real script and writes metrics.jsonl. From it come the seconds of the
steps after the first, which warms up (of all steps in the case dpo, where ours runs the reference before the first).
A pair gives one ratio, peer / ours, of the seconds for a token; the median of all pairs is reported, with its range.
On a GPU peak memory is the largest use of the card that nvidia-smi saw, vLLM's reserve included; on a CPU it is the
largest resident set of the process. Models have random weights, see dev/bench_work.py.
"""

import asyncio
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import tyro

import endpoint
import runs
from dev.bench_work import SIZES, make_models, make_rows

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = torch.cuda.is_available()
CASES = ("grpo", "sft", "dpo", "reward", "judge")
COMPARED = ("loss", "grad_norm", "reward", "score_0", "score_15")  # what both sides log, if they do


@dataclass
class Args:
    cases: tyro.conf.Positional[tuple[Literal[CASES], ...]] = ()
    """Which cases; none: all."""
    pairs: int = 3
    """How often each side runs."""
    steps: int = 3
    """Measured steps of a run."""
    against: str = ""
    """Another checkout of this repository that takes the peer's place, for grpo and sft."""
    against_flags: str = ""
    """Flags that the other checkout needs in place of ours, as one word: "--no-think --micro-batch-size 4"."""
    size: Literal["auto", *SIZES] = "auto"
    """auto: cpu, or 0.5b where a GPU is. tiny shows that a case runs; its figures mean nothing. 8b trains LoRA."""
    seed: int = 0
    """Random seed of weights, rows and sampling."""
    out: Path = Path("results/bench")
    """Folder for <case>__<device>.json and table.md."""


# --- 1. one run of one side


@dataclass
class Run:
    """What one process took."""

    seconds: list[float]
    """Of each measured step."""
    tokens: float
    """Read or written in all measured steps; 1 a step where the work has no count."""
    peak_gib: float
    logged: list[dict]
    """One a step, as the side logged it."""

    @property
    def seconds_per_token(self) -> float:
        return sum(self.seconds) / self.tokens


def watch_gpu(peak: list[float], ended: threading.Event) -> None:
    """Puts the most memory that the first card had in use into `peak`, GiB, until `ended`."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    while not ended.wait(0.25):
        used = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
        peak[0] = max(peak[0], used / 1024)


def run_side(command: list[str], out: Path, cwd: Path, first_counts: bool) -> Run:
    """Runs a command that writes `out`/metrics.jsonl; exits with its log if it fails."""
    log = out.with_suffix(".log")
    peak = [0.0]
    ended = threading.Event()
    watcher = threading.Thread(target=watch_gpu, args=(peak, ended))
    if ON_GPU:
        watcher.start()
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    ended.set()
    if ON_GPU:
        watcher.join()
    else:
        peak[0] = usage.ru_maxrss / 2**20
    if status:
        sys.exit(f"{shlex.join(command)} failed:\n{log.read_text()[-3000:]}")

    metrics = out / "round-1" / "metrics.jsonl"  # of DPO
    if not metrics.exists():
        metrics = out / "metrics.jsonl"
    logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    logged = [line for line in logged if "seconds" in line]
    ends = [0.0] + [line["seconds"] for line in logged]
    tokens = [0.0] + [line.get("num_tokens", n + 1.0) for n, line in enumerate(logged)]
    first = 0 if first_counts else 1
    seconds = [after - before for before, after in zip(ends[first:], ends[first + 1 :])]
    return Run(seconds, tokens[-1] - tokens[first], peak[0], logged)


# --- 2. the commands of both sides


def our_command(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the command line of our side, without the interpreter."""
    size = SIZES[args.size]
    if case == "reward":
        return ["-m", "dev.peers", "reward-ours", *peer_flags(folder, out, args)]
    options = {
        "--model": folder / "policy",
        "--think-format": "plain",
        "--micro-batch-tokens": size["micro_batch_tokens"],
        "--lora-r": size["lora_r"],
        "--seed": args.seed,
        "--out": out,
    }
    if case == "grpo":
        script = "train_grpo.py"
        options |= {
            "--prompts": folder / "prompts.jsonl",
            "--reward-model": folder / "reward",
            "--on-bad-format": "score",
            "--rollout": "vllm",
            "--vllm-memory": 0.25,
            "--temperature": 1.0,
            "--max-prompt-tokens": 64,
            "--max-completion-tokens": size["tokens"],
            "--prompts-per-step": size["prompts"],
            "--group-size": size["group_size"],
            "--steps": args.steps + 1,
        }
    if case == "sft":
        script = "train_sft_warmstart.py"
        options |= {
            "--traces": folder / "traces.jsonl",
            "--max-length": 64 + size["tokens"],
            "--batch-size": size["rows"],
            "--epochs": args.steps + 1,
        }
    if case == "dpo":
        script = "train_dpo.py"
        options |= {
            "--pairs": folder / "pairs.jsonl",
            "--max-prompt-tokens": 64,
            "--max-completion-tokens": size["tokens"],
            "--batch-size": size["pairs"],
            "--epochs": 2,  # table 6: the reference's pass serves two epochs
        }
    words = [script]
    for name, value in options.items():
        words += [name, str(value)]
    if case == "grpo":
        words.append("--allow-truncation")
    return words


def old_command(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns our command line for the other checkout: flags in --against-flags take the place of newer ones."""
    words = our_command(case, folder, out, args)
    if args.against_flags:
        for name in ("--think-format", "--micro-batch-tokens"):
            place = words.index(name)
            del words[place : place + 2]
    return words + shlex.split(args.against_flags)


def peer_flags(folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the flags of dev.peers."""
    options = {
        "--folder": folder,
        "--out": out,
        "--size": args.size,
        "--steps": args.steps + 1,
        "--seed": args.seed,
    }
    words = []
    for name, value in options.items():
        words += [name, str(value)]
    return words


def peer_command(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the command line of TRL's side, without the interpreter."""
    words = ["-m", "dev.peers", case, *peer_flags(folder, out, args)]
    if case == "dpo":
        words[words.index("--steps") + 1] = "2"
    return words


# --- 3. pairs and their ratios


def spread(values: list[float]) -> dict[str, float]:
    """Returns median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(case: str, folder: Path, args: Args) -> dict:
    """Runs both sides in turn, `args.pairs` times, and returns what they took and how they compare."""
    sides = {"ours": (our_command, [], ROOT)}
    if args.against:
        sides["peer"] = (old_command, [], Path(args.against).resolve())
    else:
        sides["peer"] = (peer_command, [], ROOT)
    if case == "grpo" and not args.against:
        sides["lean"] = (peer_command, ["--lean"], ROOT)

    taken: dict[str, list[Run]] = {name: [] for name in sides}
    for pair in range(args.pairs):
        for name, (build, more, cwd) in sides.items():
            out = folder / f"{case}-{name}-{pair}"
            command = [sys.executable, *build(case, folder, out, args), *more]
            run = run_side(command, out, cwd, first_counts=case in ("dpo", "reward"))
            taken[name].append(run)
            step = statistics.mean(run.seconds)
            rate = run.tokens / sum(run.seconds)
            print(
                f"  {case} {name}: {step:.2f} s a step, {rate:.0f} tokens/s, {run.peak_gib:.2f} GiB",
                flush=True,
            )

    result = {}
    for name, runs_of_side in taken.items():
        result[name] = {
            "seconds_per_step": spread([statistics.mean(run.seconds) for run in runs_of_side]),
            "tokens_per_second": spread([1 / run.seconds_per_token for run in runs_of_side]),
            "peak_gib": max(run.peak_gib for run in runs_of_side),
        }
    for name in list(sides)[1:]:
        ratios = []
        for ours, other in zip(taken["ours"], taken[name], strict=True):
            ratios.append(other.seconds_per_token / ours.seconds_per_token)
        result[f"{name} / ours"] = spread(ratios)
    result["largest_difference"] = largest_differences(taken["ours"], taken["peer"])
    result["same_tokens"] = all(
        ours.tokens == peer.tokens for ours, peer in zip(taken["ours"], taken["peer"], strict=True)
    )
    return result


def largest_differences(ours: list[Run], peers: list[Run]) -> dict[str, float]:
    """Returns how far the two sides' logs are apart, for what both log."""
    apart: dict[str, float] = {}
    for one, other in zip(ours, peers, strict=True):
        for line, peer_line in zip(one.logged, other.logged):
            for key in COMPARED:
                if key in line and key in peer_line:
                    apart[key] = max(apart.get(key, 0.0), abs(line[key] - peer_line[key]))
    return apart


# --- 4. the judge's client: its peer is the limit

LATENCY = 0.2  # seconds
CALLS = 1024
IN_FLIGHT = (32, 64, 128)


async def answer_calls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each chat request on a connection with "7", after LATENCY."""
    body = json.dumps(
        {
            "id": "x",
            "object": "chat.completion",
            "model": "m",
            "usage": {"prompt_tokens": 9, "completion_tokens": 1},
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "7"}}
            ],
        }
    )
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has hung up
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", request)[1])
            await reader.readexactly(length)
            await asyncio.sleep(LATENCY)
            writer.write((head + body).encode())
    writer.close()


async def serve() -> None:
    """Serves on a free port of this machine, which it prints."""
    server = await asyncio.start_server(answer_calls, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def judge(folder: Path, args: Args) -> dict:
    """Measures calls a second of the judge's client, as a share of calls in flight / latency."""
    program = "import asyncio; from dev import bench; asyncio.run(bench.serve())"
    server = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
    result = {}
    for in_flight in IN_FLIGHT:
        shares = []
        cpu = []
        for pair in range(args.pairs):
            requests = []
            for i in range(CALLS):
                content = f"{pair} {i} " + "word " * 200
                requests.append({"messages": [{"role": "user", "content": content}], "max_tokens": 8})
            store = folder / f"judge-{in_flight}-{pair}.jsonl"
            client = endpoint.Endpoint("m", store, url, concurrency=in_flight)
            started = time.perf_counter()
            busy = time.process_time()
            replies = list(client.ask(requests, int))
            rate = CALLS / (time.perf_counter() - started)
            cpu.append(1000 * (time.process_time() - busy) / CALLS)
            shares.append(rate / (in_flight / LATENCY))
            if [reply.value for reply in replies] != [7] * CALLS:
                sys.exit("judge: a reply was lost")
            print(
                f"  judge, {in_flight} in flight: {rate:.0f} calls/s, {shares[-1]:.2f} of the limit",
                flush=True,
            )
        result[f"{in_flight} in flight"] = {"share_of_limit": spread(shares), "cpu_ms_per_call": spread(cpu)}
    server.terminate()
    return result


# --- 5. results


def show(numbers: dict[str, float]) -> str:
    """Formats a median with its range."""
    if numbers["min"] == numbers["max"]:
        return f"**{numbers['median']:.2f}** (once)"
    return f"**{numbers['median']:.2f}** ({numbers['min']:.2f} to {numbers['max']:.2f})"


def table(folder: Path) -> str:
    """Returns the results of a folder as a Markdown table."""
    lines = [
        "| case | device | peer | seconds a step, ours | peer | peer / ours | tokens/s, ours | peak GiB, ours / peer | "
        "largest difference | commit |",
        "|" + "---|" * 10,
    ]
    for path in sorted(folder.glob("*__*.json")):
        bench = json.loads(path.read_text())
        result = bench["result"]
        commit = bench["commit"][:7]
        if bench["case"] == "judge":
            for name, numbers in result.items():
                share = show(numbers["share_of_limit"])
                lines.append(
                    f"| judge, {name} | {bench['device']} | the limit | | | {share} of it | | | | {commit} |"
                )
            continue
        ours = result["ours"]
        for name in ("peer", "lean"):
            if name not in result:
                continue
            peer = result[name]
            apart = []
            if name == "peer" and result["same_tokens"]:
                for key, value in result["largest_difference"].items():
                    apart.append(f"{key} {value:.0e}")
            cells = [
                bench["case"],
                bench["device"],
                bench["peers"][name],
                f"{ours['seconds_per_step']['median']:.3g}",
                f"{peer['seconds_per_step']['median']:.3g}",
                show(result[f"{name} / ours"]),
                f"{ours['tokens_per_second']['median']:.3g}",
                f"{ours['peak_gib']:.2f} / {peer['peak_gib']:.2f}",
                ", ".join(apart),
                commit,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def commit_of(checkout: Path) -> str:
    """Returns the commit of a checkout, with "+" if its files differ from it."""
    result = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
        capture_output=True,
        text=True,
        cwd=checkout,
    )
    return result.stdout.strip()


def main(args: Args) -> None:
    if args.pairs < 1 or args.steps < 1:
        runs.fail("--pairs and --steps must be 1 or more")
    if args.against and (not args.cases or not set(args.cases) <= {"grpo", "sft"}):
        runs.fail("--against compares grpo and sft: name those you want")
    if args.size == "auto":
        args.size = "0.5b" if ON_GPU else "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
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
            make_models(folder, SIZES[args.size], args.seed)
            make_rows(folder, SIZES[args.size], args.seed)
            if case == "judge":
                result = judge(folder, args)
            else:
                result = compare(case, folder, args)
        about = {
            "case": case,
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
            "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        }
        suffix = f"-{peers['peer']}" if args.against else ""
        path = args.out / f"{case}{suffix}__{'gpu' if ON_GPU else 'cpu'}.json"
        path.write_text(json.dumps(about | {"result": result}, indent=1) + "\n")
    print(table(args.out))
    (args.out / "table.md").write_text(table(args.out))


if __name__ == "__main__":
    main(tyro.cli(Args))
