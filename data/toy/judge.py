"""A judge of toy-world replies behind a real OpenAI-compatible endpoint, in place of a model: rules and an error rate.

    python -m data.toy.judge                       # writes data/toy/rubric_prompts.jsonl
    python -m data.toy.judge -- python train_grpo.py --preset toy --model MODEL --prompts data/toy/rubric_prompts.jsonl \\
        --rewards rubric:1 --judge toy-judge

With a command after `--` it serves on a free port of this machine, runs the command with OPENAI_BASE_URL set to it, and exits
with the command's code. It reads order, answer and numbered criteria out of the prompts of rewards.py, decides each criterion
with the checks of toy_world.py, and is wrong in a share `wrong` of the verdicts, always the same ones, so that asking again
does not help. Asked for a mark, it has no criteria before it and goes by its impression, as the annotator
of the preference pairs does: the checks less `brief`, and a taste for flattery. Anything else is answered with an error.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import tyro

from data.toy.world import CHECKS, FLATTERY, Order, check, orders_of, read_prompt, save

CASE = re.compile(r"<conversation>\n(.*?)\n</conversation>.*?<answer>\n(.*?)\n</answer>(.*)", re.S)
CRITERION = re.compile(r"^(\d+)\. (.+) \(weight [^)]+\)$", re.M)


@dataclass
class Args:
    out: Path = Path("data/toy")
    """Folder for the file; an existing one is replaced only by an equal one."""
    seed: int = 0
    n_prompts: int = 4000
    wrong: float = 0.1
    """Share of the judge's verdicts that are wrong."""


def criteria(order: Order) -> dict[str, str]:
    """What each check asks about this order, in words."""
    fields = {"avoid": order.avoid, "budget": order.budget, "word": order.word}
    return {name: text.format(**fields) for name, (_, text) in CHECKS.items()}


def rubric_prompts(n: int, seed: int) -> list[dict]:
    """The RL prompts of the toy world, each with its rubric."""
    return [
        {
            "id": row_id,
            "messages": [{"role": "user", "content": text}],
            "source": "toy",
            "rubric": [
                {"criterion": words, "weight": CHECKS[name][0]} for name, words in criteria(order).items()
            ],
        }
        for row_id, order, text, _ in orders_of("rl", n, seed)
    ]


def verdicts(order: Order, answer: str, wrong: float) -> dict[str, bool]:
    """For each criterion whether the judge says that the answer meets it."""
    passed, found = check(order, answer), {}
    for name, words in criteria(order).items():
        draw = int(hashlib.sha1(f"{words}\n{answer}".encode()).hexdigest(), 16) % 10_000
        found[words] = passed[name] != (draw < 10_000 * wrong)
    return found


def reply(prompt: str, wrong: float) -> dict:
    """The JSON that a prompt of rewards.rubric or rewards.judge_mark asks for; ValueError for any other prompt."""
    if not (case := CASE.search(prompt)):
        raise ValueError("no conversation and answer in the prompt")
    conversation, answer, task = case.groups()
    order, asked = read_prompt(conversation), CRITERION.findall(task)
    found = verdicts(order, answer, wrong)
    if ('"mark"' in task) == bool(asked):
        raise ValueError("this judge answers rubrics and marks, one at a time")
    if unknown := [words for _, words in asked if words not in found]:
        raise ValueError(f"no criterion of the toy world: {unknown[0]}")
    if asked:
        return {number: "yes" if found[words] else "no" for number, words in asked}
    weights = {words: CHECKS[name][0] for name, words in criteria(order).items() if name != "brief"}
    liking = sum(weight * found[words] for words, weight in weights.items()) + 0.3 * any(
        f in answer for f in FLATTERY
    )
    return {"reason": "", "mark": min(10, round(1 + 9 * liking / sum(weights.values())))}


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *args):
        pass

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            content = json.dumps(reply(request["messages"][-1]["content"], self.server.wrong))
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": content},
            }
            status, body = 200, {"object": "chat.completion", "model": request["model"], "choices": [choice]}
        except ValueError as e:
            status, body = 400, {"error": {"message": str(e)}}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def __init__(self, wrong: float):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wrong, self.url = wrong, f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


def run(command: list[str], wrong: float) -> int:
    """Runs a command beside the judge; its exit code. `python` is this one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"OPENAI_BASE_URL": Server(wrong).url, "OPENAI_API_KEY": "none", "PATH": path}
    process = subprocess.Popen(command, env=os.environ | own)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to the command too
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, command = tyro.cli(Args, args=sys.argv[1:at]), sys.argv[at + 1 :]
    if command:
        sys.exit(run(command, args.wrong))
    save({"rubric_prompts": rubric_prompts(args.n_prompts, args.seed)}, args.out, args.seed)
