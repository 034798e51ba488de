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
from test_readme import SOURCES
from transformers import AutoModelForCausalLM

from conftest import ROOT
from rlmt.reward_model import RewardModel
from rlmt import checkpoint
from rlmt.chat import load_config, load_tokenizer, prepare_tokenizer
from rlmt.endpoint import Endpoint
from rlmt.model import start_accelerator
from rlmt.sampler import Sampling
from rlmt.saved import generate
import train_ppo
import utils

BASE = ROOT / "data" / "toy" / "base"


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


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


def test_no_source_loads_pickles_or_foreign_code_or_gives_anything_to_a_shell():
    """The exception, code_starter.py, runs in the sandbox."""
    refused = ["exec", "eval", "os.system", "os.popen", "pickle.load", "pickle.loads", "np.load", "yaml.load"]
    safe = {"SAFE", "utils.SAFE", "options"}  # load_weights' options contain SAFE
    for path in (*SOURCES, *(ROOT / "rlmt").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or path.name == "code_starter.py":
                continue
            name = ast.unparse(call.func)
            given = {word.arg or ast.unparse(word.value): ast.unparse(word.value) for word in call.keywords}
            assert name not in refused and "push_to_hub" not in name, (path, name)
            assert given.get("shell", "False") == "False", (path, name)
            assert name != "torch.load" or given["weights_only"] == "True", path
            is_plain = "PeftModel" in name or "GenerationConfig" in name  # have neither
            if name.endswith(".from_pretrained") and not is_plain:
                assert safe & given.keys() or given["trust_remote_code"] == "False", (path, name)
    assert utils.SAFE == {"use_safetensors": True, "trust_remote_code": False}


def test_telemetry_is_off_before_the_libraries_read_that():
    code = "import train_sft_warmstart, huggingface_hub.constants as hub, os"
    code += "; print(hub.HF_HUB_DISABLE_TELEMETRY, os.environ['VLLM_NO_USAGE_STATS'])"
    env = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == "True 1\n", done.stderr


# --- model folders


def sample(folder: str) -> list:
    tokenizer = load_tokenizer(str(BASE))
    return list(
        generate(folder, [[1, 2]], tokenizer, Sampling(0.0, 2), log=Path(folder, "log"), rollout="hf")
    )


def test_pickled_weights_are_not_loaded(tmp_path, mark):
    """Safe ones beside them would be taken first."""
    folder = tmp_path / "pickled"
    shutil.copytree(BASE, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(mark)))
    for load in (
        partial(AutoModelForCausalLM.from_pretrained, folder, **utils.SAFE),
        partial(train_ppo.load_critic, str(folder), train_ppo.Args(), None, None),
        partial(sample, str(folder)),
    ):
        # the library's, or ours with one line
        with pytest.raises((OSError, SystemExit), match="model.safetensors|2"):
            load()


def test_a_model_folder_s_own_code_is_not_run(tmp_path, mark, exits, monkeypatch):
    """Not even where somebody answers the library's question with yes."""
    folder = tmp_path / "own_code"
    shutil.copytree(BASE, folder)
    (folder / "own.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
        "from transformers import PreTrainedTokenizerFast as Tokens\n"
    )
    model = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    tokens = {"AutoTokenizer": ["own.Tokens", "own.Tokens"]}
    for name, changes in (
        ("config.json", {"model_type": "own", "auto_map": model}),
        ("tokenizer_config.json", {"tokenizer_class": "Tokens", "auto_map": tokens}),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    check = partial(RewardModel.check, chat_template="", reward_on="response", think_format="plain")
    for load in (load_tokenizer, load_config, check, sample):
        assert "custom code" in exits(load, str(folder))
    with pytest.raises(ValueError, match="custom code"):
        AutoModelForCausalLM.from_pretrained(folder, **utils.SAFE)


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ messages.append.__self__.__class__.__base__ }}",
    "{{ self._TemplateReference__context }}{{ messages.clear() }}",
    "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_sandboxed(template, tmp_path, mark, exits, load, reward_models):
    file = tmp_path / "template.jinja"
    file.write_text(template.replace("MARK", str(mark)))
    told = exits(utils.or_fail, prepare_tokenizer, load("qwen25_instruct"), "think", str(file))
    options = (reward_models["chatml"], str(file), "think+response", "think")
    told += exits(utils.or_fail, RewardModel.check, *options)
    assert "<class" not in told and "environ" not in told


def test_a_pickle_in_place_of_an_optimizer_is_not_run(tmp_path, mark):
    """A run folder of somebody else's and --resume."""
    (tmp_path / "model-optimizer-rank0.pt").write_bytes(pickle.dumps(Touch(mark)))
    start_accelerator()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        checkpoint.load_optimizers(tmp_path, {"model": None})


# --- keys


KEY = "sk-test-" + "0123456789abcdef"  # in two: env.txt has what is not committed


def test_the_key_is_nowhere_in_a_run(serve, tmp_path, here, monkeypatch):
    """A whole evaluation: a model and a judge behind an endpoint that repeats the key in answers, errors and
    bodies."""

    def behave(text, n):
        if n == 0:
            return 500, {"error": {"message": f"key {KEY} overloaded"}}
        if "mark from 1 to 10" in text:
            return json.dumps({"strengths": KEY, "weaknesses": "", "score": "7"})
        return f"My key is {KEY}."

    server = serve(behave)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    task = {"id": "1", "messages": [{"role": "user", "content": "Plan a meal."}], "checklist": ["A meal?"]}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    out = tmp_path / "run"
    command = f"eval_wildbench.py --model m --model-url {server.url} --judge j --judge-url {server.url}"
    flags = f"--mode score --max-tokens 64 --tasks {tmp_path}/tasks.jsonl --out {out}"
    done = here(*command.split(), *flags.split())
    files = [path.read_text() for path in out.rglob("*") if path.is_file()]
    told = done.stdout + done.stderr + "".join(files)
    assert done.returncode == 0 and "My key is ***." in told and KEY not in told
    assert {auth for _, auth in server.requests} == {f"Bearer {KEY}"}


def test_a_key_in_a_url_is_refused_and_not_repeated(tmp_path, exits):
    told = exits(Endpoint, "m", tmp_path / "store.jsonl", f"user:{KEY}@host:8000/v1")
    assert "without a user, password or key" in told and KEY not in told
