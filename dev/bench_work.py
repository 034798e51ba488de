"""Models and rows on which `dev.bench` times both sides of a comparison.

All sizes but `small` have models with random weights and rows of known lengths.

The policy ends its completions at random, so that their lengths have the long tail that real completions have.
The vocabulary consists of words, so that a text has as many tokens for the reward model as for the policy.
"""

import math
import statistics
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlmt.chat import load_config, load_tokenizer
from rlmt.data import read_prompts, write_jsonl
from rlmt.model import without_weights
from utils import DEVICE, DTYPE, SAFE, fail

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
PAD_ID = 0
END_ID = 1
N_PROMPTS = 64
N_RATES = 16
# a prompt begins with one of the rate words w4 ... w19, whose rate makes the end of turn e^rate times as likely
RATES = [statistics.NormalDist(0, 0.5).inv_cdf((i + 0.5) / N_RATES) for i in range(N_RATES)]
FIRST_RATE_WORD = len(SPECIAL_TOKENS)
FIRST_PLAIN_WORD = FIRST_RATE_WORD + N_RATES

# shapes of the GPU sizes: Qwen2.5-0.5B, Qwen2.5-1.5B and Llama-3.1-8B
SHAPE_0_5B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
SHAPE_1_5B = SHAPE_0_5B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
SHAPE_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPE_CPU = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SHAPE_CPU_REWARD = SHAPE_CPU | {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
SHAPE_TINY = SHAPE_CPU_REWARD | {"vocab_size": 2048}

# prompts: of one GRPO step; they have at most max_prompt_tokens. peer_micro_batch: rows that a peer reads at once.
# micro_batch_tokens: what we read at once. vllm_memory: the share of a GPU that vLLM reserves.
# max_tokens, median_tokens: of completions. traces, pairs, texts: rows of SFT, of DPO and for the reward model.
SIZES = {
    "tiny": {
        "policy": SHAPE_TINY,
        "reward": SHAPE_TINY,
        "prompts": 2,
        "group_size": 4,
        "peer_micro_batch": 2,
        "micro_batch_tokens": 512,
        "max_prompt_tokens": 64,
        "max_tokens": 48,
        "median_tokens": 12,
        "traces": 8,
        "pairs": 8,
        "texts": 16,
        "gradient_checkpointing": True,
        "lora_r": 0,
        "vllm_memory": 0.25,
    },
    "cpu": {
        "policy": SHAPE_CPU,
        "reward": SHAPE_CPU_REWARD,
        "prompts": 8,
        "group_size": 4,
        "peer_micro_batch": 4,
        "micro_batch_tokens": 1024,
        "max_prompt_tokens": 64,
        "max_tokens": 512,
        "median_tokens": 70,
        "traces": 64,
        "pairs": 32,
        "texts": 128,
        "gradient_checkpointing": True,
        "lora_r": 0,
        "vllm_memory": 0.25,
    },
    "small": {  # a real model and real prompts, see copy_models and copy_prompts
        "prompts": 4,
        "group_size": 4,
        "peer_micro_batch": 8,  # TRL's default
        "micro_batch_tokens": 1024,  # that of train_grpo.py's preset of this name
        "gradient_checkpointing": False,  # so has the preset
        "max_prompt_tokens": 128,
        "max_tokens": 96,
        "lora_r": 0,
        "vllm_memory": 0.25,
    },
    "0.5b": {
        "policy": SHAPE_0_5B,
        "reward": SHAPE_0_5B,
        "prompts": 16,
        "group_size": 8,
        "peer_micro_batch": 4,
        "micro_batch_tokens": 16384,
        "max_prompt_tokens": 64,
        "max_tokens": 4096,
        "median_tokens": 600,
        "traces": 128,
        "pairs": 64,
        "texts": 512,
        "gradient_checkpointing": True,
        "lora_r": 0,
        "vllm_memory": 0.25,
    },
}
SIZES["1.5b"] = SIZES["0.5b"] | {"policy": SHAPE_1_5B, "peer_micro_batch": 2, "micro_batch_tokens": 8192}
SIZES["8b"] = SIZES["0.5b"] | {
    "policy": SHAPE_8B,
    "reward": SHAPE_0_5B | {"vocab_size": 128256},
    "prompts": 8,
    "peer_micro_batch": 1,
    "micro_batch_tokens": 8192,
    "lora_r": 64,
    # The weights take 15 GiB. With 0.25 the cache would have room for about 20,000 tokens, and the 64 completions
    # need 24,000 at their peak (both computed).
    "vllm_memory": 0.4,
}


def make_tokenizer(folder: Path, n_words: int) -> None:
    """Saves a tokenizer with one token a word: decoding and encoding again gives the same ids."""
    plain = [f"w{i}" for i in range(len(SPECIAL_TOKENS), n_words)]
    vocabulary = {word: i for i, word in enumerate(SPECIAL_TOKENS + plain)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=f"w{FIRST_RATE_WORD}"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[2:],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def give_lengths(model: LlamaForCausalLM, median: float) -> None:
    """Sets weights so that lengths of completions are exponential, with a rate that differs between prompts.

    After any token the end of turn has the probability log(2) / median, times e^rate of the prompt's rate word.
    Residual dimensions 0 (a constant), 1 (the rate) and 3 (marks a rate word) are written by the embedding alone.
    Head 0 of the first layer looks for the mark, in the slowest pair of its rotary embedding, and writes the rate to
    dimension 2. The LM head reads dimensions 0 and 2 for the end of turn.
    """
    net = model.model
    embeddings = net.embed_tokens.weight
    embeddings[:, :4] = torch.tensor([6.0, 0.0, 0.0, 0.0])  # large: the norm must not depend on the rest
    embeddings[FIRST_RATE_WORD:FIRST_PLAIN_WORD, 1] = torch.tensor(RATES)
    embeddings[FIRST_RATE_WORD:FIRST_PLAIN_WORD, 3] = 1.0
    for layer in net.layers:
        layer.self_attn.o_proj.weight[:4] = 0
        layer.mlp.down_proj.weight[:4] = 0

    size = model.config.head_dim
    head = net.layers[0].self_attn
    for projection in (head.q_proj, head.k_proj, head.v_proj):
        projection.weight[:size] = 0
    head.q_proj.weight[size // 2 - 1, 0] = 2.0
    head.k_proj.weight[size // 2 - 1, 3] = 2.0
    head.v_proj.weight[0, 1] = 1.0
    head.o_proj.weight[2, 0] = 0.02

    # two prompts, with the lowest and the highest rate, give two equations for the two weights of the LM head
    lowest = FIRST_RATE_WORD
    highest = FIRST_PLAIN_WORD - 1
    prompts = torch.tensor([[100, lowest, 101, 102, 103], [100, highest, 101, 102, 103]], device=model.device)
    hidden = net(prompts).last_hidden_state[:, -1]
    others = model.lm_head(hidden).logsumexp(-1)
    rates = torch.tensor([RATES[0], RATES[-1]], device=model.device)
    wanted = others - math.log(median / math.log(2)) + rates
    model.lm_head.weight[END_ID] = 0
    model.lm_head.weight[END_ID, [0, 2]] = torch.linalg.solve(hidden[:, [0, 2]], wanted)


def make_models(folder: Path, size: dict, seed: int) -> None:
    """Saves the policy and the reward model as ordinary model folders, policy/ and reward/."""
    classes = {"policy": LlamaForCausalLM, "reward": LlamaForSequenceClassification}
    for name, model_class in classes.items():
        shape = size[name]
        config = LlamaConfig(
            **shape,
            head_dim=shape["hidden_size"] // shape["num_attention_heads"],
            max_position_embeddings=8704,
            num_labels=1,
            pad_token_id=PAD_ID,
            eos_token_id=END_ID,
            bos_token_id=None,
        )
        torch.manual_seed(seed)
        with torch.device(DEVICE):
            model = model_class(config)
        if name == "policy":
            give_lengths(model, size["median_tokens"])
        model.to(getattr(torch, DTYPE)).save_pretrained(folder / name)
        make_tokenizer(folder / name, shape["vocab_size"])


def make_all(folder: str, size_name: str, seed: str) -> None:
    """Makes models and rows of a size; for a process of its own, which gives the card's memory back as it ends."""
    size = SIZES[size_name]
    Path(folder).mkdir(exist_ok=True)
    make_models(Path(folder), size, int(seed))
    make_rows(Path(folder), size, int(seed))


def copy_models(folder: Path, model: Path, seed: int) -> None:
    """Puts a real model in place as policy/, and saves it with a random head as reward/."""
    (folder / "policy").symlink_to(model.resolve())
    torch.manual_seed(seed)
    reward_model = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype="float32", **SAFE
    )
    reward_model.save_pretrained(folder / "reward")
    load_tokenizer(str(model)).save_pretrained(folder / "reward")


def copy_prompts(folder: Path, prompts: str, model: Path, size: dict) -> None:
    """Writes the first 64 prompts that are short enough to prompts.jsonl; exits with 2 if there are fewer."""
    tokenizer = load_tokenizer(str(model))
    chosen = []
    for row in read_prompts(prompts):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        if len(tokenizer(text, add_special_tokens=False).input_ids) <= size["max_prompt_tokens"]:
            chosen.append({"id": row["id"], "messages": row["messages"]})
        if len(chosen) == N_PROMPTS:
            break
    if len(chosen) < N_PROMPTS:
        fail(
            f"--prompts {prompts}: fewer than {N_PROMPTS} of them have {size['max_prompt_tokens']} tokens or less"
        )
    write_jsonl(folder / "prompts.jsonl", chosen)


def n_multiplied(auto_class, path: Path) -> int:
    """Counts a model's weights that a token is multiplied with: all but the table of embeddings."""
    model = without_weights(auto_class, load_config(str(path)))
    table = model.get_input_embeddings().weight
    count = sum(weight.numel() for weight in model.parameters() if weight is not table)
    head = model.get_output_embeddings()
    if head is not None and head.weight is table:  # tied: the head is multiplied with
        count += table.numel()
    return count


def operations_per_token(folder: Path, lora: bool) -> tuple[float, float]:
    """Counts the arithmetic of a GRPO step per token of prompt and completion: of the update, and of the whole step.

    A weight costs 2 operations in a forward and 4 in a backward; a frozen one 2, as it has no gradient. The
    update has a forward of the reference. Attention's scores and recomputed activations do not count.
    """
    n_policy = n_multiplied(AutoModelForCausalLM, folder / "policy")
    n_reward = n_multiplied(AutoModelForSequenceClassification, folder / "reward")
    backward = 2 if lora else 4
    of_update = (2 + 2 + backward) * n_policy
    sampling = 2 * n_policy
    return of_update, sampling + of_update + 2 * n_reward


def matrix_rate(dtype: str) -> float:
    """Measures the operations a second of this machine in a product of two large matrices."""
    width = 8192 if DEVICE == "cuda" else 2048
    # random: of equal numbers a card takes less power, and so it computes faster than it does in a model
    matrix = torch.randn(width, width, dtype=getattr(torch, dtype), device=DEVICE)
    n_products = 10 if DEVICE == "cuda" else 1  # on a card one takes a millisecond

    def seconds_of_a_product() -> float:
        started = time.perf_counter()
        for _ in range(n_products):
            product = matrix @ matrix
        product[0, 0].item()  # waits for the card
        return (time.perf_counter() - started) / n_products

    warm_at = time.perf_counter() + 1.0  # a card that was idle raises its clock as it works
    while time.perf_counter() < warm_at:
        seconds_of_a_product()
    shortest = min(seconds_of_a_product() for _ in range(10))
    return 2 * width**3 / shortest


def lognormal_lengths(n: int, median: float, longest: int, generator: torch.Generator) -> list[int]:
    """Draws `n` lengths with sigma 1, between 2 and `longest`."""
    lengths = median * torch.randn(n, generator=generator).exp()
    return lengths.clamp(2, longest).long().tolist()


def random_text(n_words: int, vocabulary: int, generator: torch.Generator) -> str:
    """Returns `n_words` plain words."""
    ids = torch.randint(FIRST_PLAIN_WORD, vocabulary, (n_words,), generator=generator)
    return " ".join(f"w{i}" for i in ids.tolist())


def make_rows(folder: Path, size: dict, seed: int) -> None:
    """Writes prompts.jsonl, traces.jsonl, pairs.jsonl and texts.jsonl, as the scripts read them."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = size["policy"]["vocab_size"]

    def question(i: int) -> list[dict]:
        rate_word = f"w{FIRST_RATE_WORD + i % N_RATES}"
        content = f"{rate_word} {random_text(24 + i % 17, vocabulary, generator)}"
        return [{"role": "user", "content": content}]

    def answers(n: int, longest: int = size["max_tokens"] - 2) -> list[str]:
        lengths = lognormal_lengths(n, size["median_tokens"], longest, generator)
        return [random_text(length, vocabulary, generator) for length in lengths]

    prompts = [{"id": str(i), "messages": question(i)} for i in range(N_PROMPTS)]
    write_jsonl(folder / "prompts.jsonl", prompts)

    traces = []
    for i, answer in enumerate(answers(size["traces"])):
        trace = {"id": str(i), "messages": question(i), "thinking": "w20", "response": answer}
        traces.append(trace | {"teacher": "none"})
    write_jsonl(folder / "traces.jsonl", traces)

    pairs = []
    both = zip(answers(size["pairs"]), answers(size["pairs"]), strict=True)
    for i, (chosen, rejected) in enumerate(both):
        pairs.append({"id": str(i), "messages": question(i), "chosen": chosen, "rejected": rejected})
    write_jsonl(folder / "pairs.jsonl", pairs)

    texts = []
    for i, answer in enumerate(answers(size["texts"], longest=2 * size["max_tokens"])):
        texts.append({"id": str(i), "messages": question(i), "text": answer})
    write_jsonl(folder / "texts.jsonl", texts)
