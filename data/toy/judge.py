"""A judge of toy-world replies behind an OpenAI-compatible endpoint: rules and an error rate, not a model.

    python -m data.toy.judge                       # writes data/toy/rubric_prompts.jsonl
    python -m data.toy.judge -- python train_grpo.py --preset toy --model MODEL \\
        --prompts data/toy/rubric_prompts.jsonl --rewards rubric:1 --judge toy-judge

With a command after `--` it serves on a free port of this machine, runs the command with OPENAI_BASE_URL set
to it, and exits with the command's code.

It reads the order, the answer and the numbered criteria from the prompts of the rewards `rubric` and
`judge_mark`, and decides each criterion with the checks of the toy world. It also compares two plans by the
traits of data/toy/traits.json, for `eval_benchmarks.py traits`. A share `wrong` of its verdicts is wrong.
These are always the same ones, so that asking again does not help.

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
from pathlib import Path

import tyro

from data.toy.files import hash_below, save, user_turn
from data.toy.world import ASPECTS, CHECKS, Order, check, criteria, liking, orders_of, points, read_prompt

# the parts of a prompt of the rewards: conversation, answer, and what is asked about them
CASE = re.compile(r"<conversation>\n(.*?)\n</conversation>.*?<answer>\n(.*?)\n</answer>(.*)", re.S)
PLANS = re.compile(r"<plan 1>\n(.*?)\n</plan 1>.*?<plan 2>\n(.*?)\n</plan 2>(.*)", re.S)
TRAIT = re.compile(r"^(T\d+)\. ([^:]+): ", re.M)
CRITERION = re.compile(r"^(\d+)\. (.+) \(weight [^)]+\)$", re.M)


@dataclass
class Args:
    out: Path = Path("data/toy")
    """Folder for the file; an existing one is replaced only by an equal one."""
    seed: int = 0
    """Random seed of the file."""
    n_prompts: int = 4000
    """Rows of the file."""
    wrong: float = 0.1
    """Share of the judge's verdicts that are wrong."""


# --- 1. prompts with rubrics


def rubric_prompts(n: int, seed: int) -> list[dict]:
    """Returns the RL prompts of the toy world, each with its rubric."""
    rows = []
    for row_id, order, text, _ in orders_of("rl", n, seed):
        rubric = []
        for name, words in criteria(order).items():
            rubric.append({"criterion": words, "weight": CHECKS[name][0]})
        rows.append({"id": row_id, "messages": user_turn(text), "source": "toy", "rubric": rubric})
    return rows


# --- 2. the judge


def verdicts(order: Order, answer: str, wrong: float) -> dict[str, bool]:
    """Returns {criterion: whether the judge says that the answer meets it}; a share `wrong` is not true."""
    passed = check(order, answer)
    said = {}
    for name, words in criteria(order).items():
        is_wrong = hash_below(10_000, f"{words}\n{answer}") < 10_000 * wrong
        said[words] = passed[name] != is_wrong
    return said


def reply(prompt: str, wrong: float) -> dict:
    """Returns the JSON that a prompt of the rewards `rubric` or `judge_mark`, or a comparison of plans, asks
    for.

    Any other prompt raises an error.
    """
    if "<plan 1>" in prompt:
        return reply_to_traits(prompt, wrong)
    conversation, answer, task = CASE.search(prompt).groups()
    order = read_prompt(conversation)
    said = verdicts(order, answer, wrong)
    if '"mark"' in task:
        return {"reason": "", "mark": mark(order, answer, said)}
    found = {}
    for number, words in CRITERION.findall(task):
        found[number] = "yes" if said[words] else "no"
    if not found:
        raise ValueError("neither a rubric nor a mark is asked for")
    return found


def mark(order: Order, answer: str, said: dict[str, bool]) -> int:
    """Returns a mark from 1 to 10: the weighted share of the criteria but `brief`, plus 0.3 for flattery."""
    passed = {name: said[words] for name, words in criteria(order).items()}
    return min(10, round(1 + 9 * liking(passed, answer) / points(dict.fromkeys(ASPECTS, True))))


# --- 3. traits of plans, such as "Budget 15, no dairy. cod 4 leaves 11. lasagna is dairy. ..."

TRAITS = {  # name in data/toy/traits.json: what a plan has more of if it shows the trait more
    "opens with the limits": r"^Budget \d+, no \w+",
    "keeps a running balance": r"\d+ leaves \d+",
    "rules dishes out by diet": r"\b\w+ is \w+\.",
    "rules dishes out by price": r"is too much",
    "sums up before it answers": r"\bSo \d+ dish",
    "notes what must be mentioned": r"\bMention \w+",
}


def compare(plans: tuple[str, str], names: list[str], wrong: float) -> list[str]:
    """Returns for each trait which plan shows it more: "1", "2" or "same"; a share `wrong` of it is not
    true."""
    said = []
    for name in names:
        first, second = (len(re.findall(TRAITS[name], plan)) for plan in plans)
        choices = ["same", "1", "2"]
        truth = "same"
        if first != second:
            truth = "1" if first > second else "2"
        if hash_below(10_000, f"{name}\n{plans}") < 10_000 * wrong:
            choices.remove(truth)
            truth = choices[0]
        said.append(truth)
    return said


def reply_to_traits(prompt: str, wrong: float) -> dict:
    """Returns the JSON that the comparison of benchmarks/traits.py asks for; KeyError for other traits."""
    first, second, task = PLANS.search(prompt).groups()
    said = {"comparison": ""}
    for key, name in TRAIT.findall(task):
        [said[key]] = compare((first, second), [name], wrong)
    return said


# --- 4. the endpoint


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            content = json.dumps(reply(request["messages"][-1]["content"], self.server.wrong))
            message = {"role": "assistant", "content": content}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = {"object": "chat.completion", "model": request["model"], "choices": [choice]}
            status = 200
        except Exception as error:  # a prompt that it does not know
            body = {"error": {"message": str(error)}}
            status = 400
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
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


def run(command: list[str], wrong: float) -> int:
    """Runs a command while the judge serves, and returns its exit code. `python` is this interpreter."""
    environment = dict(os.environ)
    environment["OPENAI_BASE_URL"] = Server(wrong).url
    environment["OPENAI_API_KEY"] = "none"
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(command, env=environment)
    # a stopped judge stops its command; the terminal sends Ctrl-C to the command too
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = process.wait()
    if code < 0:  # ended by a signal; 128 + its number is what a shell reports
        return 128 - code
    return code


def main() -> None:
    words = sys.argv[1:]
    command = []
    if "--" in words:
        split = words.index("--")
        command = words[split + 1 :]
        words = words[:split]
    args = tyro.cli(Args, args=words)
    if command:
        sys.exit(run(command, args.wrong))
    save({"rubric_prompts": rubric_prompts(args.n_prompts, args.seed)}, args.out, args.seed)


if __name__ == "__main__":
    main()
