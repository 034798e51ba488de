"""Nothing from outside is run, and no key is told: hostile model and run folders, templates, URLs; the real
functions and scripts. What a program that is meant to be run can do stands in test_sandbox.py."""

import ast
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from test_wildbench import run  # noqa: F401
from transformers import AutoModelForCausalLM

from rlmt import checkpoint
from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import chat as templates
import torch
import train_ppo
import utils
from rewards.preference import RewardModel
from rlmt import chat

ROOT = Path(__file__).parents[2]
BASE = ROOT / "data" / "toy" / "base"
FOLDERS = (".", "benchmarks", "data", "data/toy", "dev", "experiments", "rewards")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def toy_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    command = [sys.executable, "-m", "data.toy.world", "--out", str(folder)]
    few = [word for name in ("traces", "prompts", "pairs", "tasks") for word in (f"--n-{name}", "8")]
    subprocess.run([*command, *few], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def mark(tmp_path):
    """A file that must not come to be, and that a hostile pickle here does make."""
    path = tmp_path / "touched"
    pickle.loads(pickle.dumps(Touch(path)))
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists()


# --- what the sources call


def calls(tree: ast.AST):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_every_model_is_loaded_without_pickles_and_foreign_code():
    found = 0
    for path in SOURCES:
        for call in calls(ast.parse(path.read_text())):
            name = ast.unparse(call.func)
            if not name.endswith("from_pretrained") or name.split(".")[0] in (
                "PeftModel",
                "GenerationConfig",
            ):
                continue
            found += 1
            given = {k.arg or ast.unparse(k.value): ast.unparse(k.value) for k in call.keywords}
            weights = not name.startswith(("AutoTokenizer", "AutoConfig", "auto."))
            assert (
                given.get("utils.SAFE", given.get("SAFE"))
                if weights
                else given.get("trust_remote_code") == "False"
            ), (path, name)
    assert found >= 11 and utils.SAFE == {"use_safetensors": True, "trust_remote_code": False}


def test_telemetry_is_off_before_the_libraries_read_that():
    for path in ROOT.glob("*_*.py"):  # train_*.py and eval_*.py
        modules = []
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                modules += [name.name.split(".")[0] for name in node.names]
        assert next(name for name in modules if name not in sys.stdlib_module_names) == "rlmt", path
    code = """if True:
        import rlmt, huggingface_hub.constants, importlib.util, pathlib
        vllm = pathlib.Path(importlib.util.find_spec("vllm").origin)
        spec = importlib.util.spec_from_file_location("envs", vllm.with_name("envs.py"))  # alone: vLLM itself takes long
        envs = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(envs)
        print(huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY, envs.VLLM_NO_USAGE_STATS)
    """
    env = {k: v for k, v in os.environ.items() if "TELEMETRY" not in k and "USAGE_STATS" not in k}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr


# --- model folders


@pytest.fixture
def pickled(tmp_path, mark):
    """A model folder whose weights are a pickle; a safe one beside it would be taken first."""
    folder = tmp_path / "pickled"
    shutil.copytree(BASE, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(mark)))
    return folder


def test_pickled_weights_are_not_loaded(pickled):
    template = pickled / "template.jinja"
    template.write_text(templates.CHAT_TEMPLATES["plain"])
    config = json.loads((pickled / "config.json").read_text())
    (pickled / "config.json").write_text(json.dumps(config | {"id2label": {"0": "x"}, "label2id": {"x": 0}}))
    tokenizer = chat.load_tokenizer(str(BASE))
    for load in (
        lambda: AutoModelForCausalLM.from_pretrained(pickled, **utils.SAFE),
        lambda: RewardModel(str(pickled), "response", chat_template=str(template)),
        lambda: train_ppo.load_critic(str(pickled), train_ppo.Args()),
        lambda: list(
            rollout.generate(str(pickled), [[1, 2]], tokenizer, rollout.Sampling(0.0, 2), log=pickled / "log")
        ),
    ):
        # the library's, or ours with one line
        with pytest.raises((OSError, SystemExit), match="model.safetensors|2"):
            load()


def test_a_model_folder_s_own_code_is_not_run(tmp_path, mark, exits, monkeypatch):  # noqa: F811
    """Not even where somebody answers the library's question with yes."""
    folder = tmp_path / "own_code"
    shutil.copytree(BASE, folder)
    (folder / "own.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
        "from transformers import PreTrainedTokenizerFast as Tokens\n"
    )
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own"}
    classes = (
        "AutoModelForCausalLM",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
    )
    config["auto_map"] = {"AutoConfig": "own.Config", **dict.fromkeys(classes, "own.Model")}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            tokens
            | {"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": ["own.Tokens", "own.Tokens"]}}
        )
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    check = partial(RewardModel.check, chat_template="", reward_on="response", think_format="plain")
    for load in (chat.load_tokenizer, chat.load_config, check):
        assert "custom code" in exits(load, str(folder))
    assert "custom code" in exits(train_ppo.load_critic, str(folder), train_ppo.Args())
    tokenizer = chat.load_tokenizer(str(BASE))
    with pytest.raises(ValueError, match="custom code"):
        AutoModelForCausalLM.from_pretrained(folder, **utils.SAFE)
    sampling = rollout.Sampling(0.0, 2)
    options = {"log": folder / "log", "rollout": "hf"}
    samples = rollout.generate(str(folder), [[1, 2]], tokenizer, sampling, **options)
    assert "custom code" in exits(list, samples)


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ messages.append.__self__.__class__.__base__ }}",
    "{{ self._TemplateReference__context }}{{ messages.clear() }}",
    "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_sandboxed(tmp_path, mark, exits, load, reward_models, template):  # noqa: F811
    file = tmp_path / "template.jinja"
    file.write_text(template.replace("MARK", str(mark)))
    told = exits(utils.or_fail, templates.prepare_tokenizer, load("qwen25_instruct"), "think", str(file))
    told += exits(
        utils.or_fail, RewardModel.check, reward_models["chatml"], str(file), "think+response", "think"
    )
    assert "<class" not in told and "environ" not in told


# --- run folders


def test_a_pickle_in_place_of_an_optimizer_is_not_run(tmp_path, mark):
    """A run folder of somebody else's and --resume."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    (tmp_path / "model-optimizer-rank0.pt").write_bytes(pickle.dumps(Touch(mark)))
    policy.start_accelerator()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        checkpoint.load_optimizer(tmp_path, "model", optimizer)


# --- keys


KEY = "sk-test-0123456789abcdef"
OTHER_KEY = "sk-other-0123456789abcdef"


def test_the_key_is_nowhere_in_a_run(serve, tmp_path, toy_data, run, monkeypatch):  # noqa: F811
    """A whole evaluation: a model and a judge behind an endpoint that repeats the key in answers, errors and
    bodies."""

    def behave(text, n):
        if n == 0:
            return (500, {"error": {"message": f"key {KEY} overloaded"}})
        return (
            json.dumps({"strengths": KEY, "weaknesses": "", "score": "7"})
            if "mark from 1 to 10" in text
            else f"My key is {KEY}."
        )

    server, out = serve(behave), tmp_path / "run"
    denied = serve(
        lambda text, n: (
            401,
            {"error": {"message": f"wrong key {OTHER_KEY}", "code": "invalid_api_key"}},
        ),
    )
    words = [
        "--model",
        "m",
        "--model-url",
        server.url,
        "--judge",
        "j",
        "--judge-url",
        server.url,
        "--mode",
        "score",
        "--limit",
        2,
        "--max-tokens",
        64,
        "--tasks",
        toy_data / "benchmark_tasks.jsonl",
    ]
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("JUDGE_KEY", OTHER_KEY)
    done = run(*words, "--out", out)
    told = done.stdout + done.stderr + "".join(f.read_text() for f in out.rglob("*") if f.is_file())
    assert (
        {auth for _, auth in server.requests} == {f"Bearer {KEY}"}
        and "My key is ***." in told
        and KEY not in told
    )
    assert {"command.txt", "config.json", "env.txt", "judge.jsonl", "model.jsonl", "summary.json"} <= set(
        os.listdir(out)
    )
    words[7] = denied.url
    done = run(*words, "--key-env", "127.0.0.1=JUDGE_KEY", "--out", tmp_path / "denied", ok=False)
    told = (
        done.stdout
        + done.stderr
        + "".join(f.read_text() for f in (tmp_path / "denied").rglob("*") if f.is_file())
    )
    assert done.returncode == 2 and "wrong key ***" in told and OTHER_KEY not in told
    assert denied.requests[0][1] == f"Bearer {OTHER_KEY}"
