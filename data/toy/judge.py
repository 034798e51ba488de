"""A judge of toy-world replies behind an OpenAI-compatible endpoint: rules and an error rate, not a model.

    python -m data.toy.judge                       # writes data/toy/rubric_prompts.jsonl
    python -m data.toy.judge -- python train_grpo.py --preset toy --model MODEL \\
        --prompts data/toy/rubric_prompts.jsonl --rewards rubric:1 --judge toy-judge

With a command after `--` it serves on a free port of this machine, runs the command with OPENAI_BASE_URL set
to it, and exits with the command's code.

It reads the order, the answer and the numbered criteria from the prompts of the rewards `rubric` and
`judge_mark`, and decides each criterion with the checks of the toy world. A share `wrong` of its verdicts is
wrong. These are always the same ones, so that asking again does not help.

A prompt for a mark has no criteria. The judge then follows its impression, as the annotator of the preference
pairs does: all checks but `brief`, and a taste for flattery. It answers any other prompt with an error.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tyro

from data.toy.files import ToyArgs, hash_below
from data.toy.world import ASPECTS, CHECKS, Order, check, criteria, liking, points, prompt_rows, read_prompt

# the parts of a prompt of the rewards: conversation, answer, and what is asked about them
CASE = re.compile(r"<conversation>\n(.*?)\n</conversation>.*?<answer>\n(.*?)\n</answer>(.*)", re.S)
CRITERION = re.compile(r"^(\d+)\. (.+) \(weight [^)]+\)$", re.M)


@dataclass
class Args(ToyArgs):
    n_prompts: int = 4000
    """Rows of the file."""
    wrong: float = 0.1
    """Share of the judge's verdicts that are wrong."""
    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """After `--`: what to run while the judge serves; without it, the file is written."""


# --- 1. prompts with rubrics


def rubric_prompts(n: int, seed: int) -> list[dict]:
    """Returns the RL prompts of the toy world, each with its rubric."""
    rows = prompt_rows(n, seed)
    for row in rows:
        order = read_prompt(row["messages"][0]["content"])
        row["rubric"] = []
        for name, words in criteria(order).items():
            row["rubric"].append({"criterion": words, "weight": CHECKS[name][0]})
    return rows


# --- 2. the judge


def verdicts(order: Order, answer: str, wrong: float) -> dict[str, bool]:
    """Returns {criterion: whether the judge says that the answer meets it}; a share `wrong` is not true."""
    passed = check(order, answer)
    met = {}
    for name, words in criteria(order).items():
        is_wrong = hash_below(10_000, f"{words}\n{answer}") < 10_000 * wrong
        met[words] = passed[name] != is_wrong
    return met


def reply(prompt: str, wrong: float) -> dict:
    """Returns the JSON that a prompt of the rewards `rubric` or `judge_mark` asks for.

    Any other prompt raises an error.
    """
    conversation, answer, task = CASE.search(prompt).groups()
    order = read_prompt(conversation)
    met = verdicts(order, answer, wrong)
    if '"mark"' in task:
        return {"reason": "", "mark": mark(answer, met)}
    found = {}
    for number, words in CRITERION.findall(task):
        found[number] = "yes" if met[words] else "no"
    if not found:
        raise ValueError("neither a rubric nor a mark is asked for")
    return found


def mark(answer: str, met: dict[str, bool]) -> int:
    """Returns a mark from 1 to 10: the weighted share of the criteria but `brief`, plus 0.3 for flattery."""
    passed = dict(zip(CHECKS, met.values()))
    return min(10, round(1 + 9 * liking(passed, answer) / points(dict.fromkeys(ASPECTS, True))))


# --- 3. the endpoint


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            content = json.dumps(reply(request["messages"][-1]["content"], self.server.wrong))
        except Exception as error:  # a prompt that it does not know
            self.send_error(400, repr(error))
            return
        message = {"role": "assistant", "content": content}
        data = json.dumps({"choices": [{"finish_reason": "stop", "message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """Serves the judge at `url` until the process ends or `shutdown` is called."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, wrong: float):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wrong = wrong
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


def run(command: tuple[str, ...], wrong: float) -> int:
    """Runs a command while the judge serves, and returns its exit code."""
    address = {"OPENAI_BASE_URL": Server(wrong).url, "OPENAI_API_KEY": "none"}
    process = subprocess.Popen(command, env=os.environ | address)
    # a stopped judge stops its command; the terminal sends Ctrl-C to the command too
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return process.wait()


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.command:
        sys.exit(run(args.command, args.wrong))
    args.save({"rubric_prompts": rubric_prompts(args.n_prompts, args.seed)})
