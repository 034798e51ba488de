"""What must be the same everywhere for results to be comparable: the think format, chat rendering and the reward model.
(Arguments, data rows and the run folder are in runs.py.)"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

# --- 1. the think format

THINK_FORMATS = {
    "think": "<think> z </think> y",  # warm-started, thinking
    "plain": "y",  # warm-started or instruct, no thinking (RLHF)
    "zero_think": "<think> z </think> <response> y </response>",  # a base model asked by ZERO_INSTRUCTION
    "zero_plain": "<response> y </response>",
}
TAGS = ("<think>", "</think>", "<response>", "</response>")


class ThinkParts(NamedTuple):
    thinking: str
    response: str
    status: str  # ok, no_open, no_close, nested, empty_response or truncated


def split_thinking(text: str, think_format: str = "think", finished: bool = True) -> ThinkParts:
    """Splits a completion into thinking z and response y, both stripped; the one parser of this repository.

    Args:
        text: the completion, decoded without its end-of-turn token. Any string is fine.
        think_format: a key of THINK_FORMATS.
        finished: False if the token limit cut the completion off.

    Returns:
        ThinkParts. `status` is the first of these that holds: `no_open` (an opening tag is missing or something stands
        before it), `nested` (a tag of the format occurs twice), `truncated` (cut off before its end), `no_close`,
        `empty_response`, else `ok`. Without `ok`, `response` holds what follows the last closing tag, maybe nothing:
        whether that is scored is the caller's decision, never a default.
    """
    if think_format not in THINK_FORMATS:
        raise ValueError(f"think_format {think_format!r} is unknown; use one of {', '.join(THINK_FORMATS)}")
    tags = [tag for tag in TAGS if tag in THINK_FORMATS[think_format]]
    zero = think_format.startswith("zero")
    if zero:  # the answer ends at its closing tag, whatever follows (evaluation code of the paper)
        head, closed, _ = text.partition("</response>")
        text, finished = head + closed, finished or bool(closed)
    rest, thinking, status = text.strip(), "", "ok"
    for opening, closing in zip(tags[::2], tags[1::2]):
        if not rest.startswith(opening):
            status = "truncated" if not finished and opening.startswith(rest) else "no_open"
            break
        inside, closed, rest = rest[len(opening) :].partition(closing)
        if opening == "<think>":
            thinking = inside.strip()
        else:
            rest = inside
        if not closed:
            status = "no_close" if finished else "truncated"
            break
        rest = rest.strip()
    if status != "no_open" and any(text.count(tag) > 1 for tag in tags):
        status = "nested"
    elif status == "ok" and not finished:
        status = "truncated"
    elif status == "ok" and not rest:
        status = "empty_response"
    return ThinkParts(thinking, "" if status == "no_close" else rest.strip(), status)


def join_thinking(thinking: str, response: str, think_format: str) -> str:
    """The completion a model of `think_format` should write; inverse of `split_thinking`."""
    z, y = thinking.strip(), response.strip()
    return {"think": f"<think>\n{z}\n</think>\n\n{y}", "plain": y, "zero_plain": f"<response> {y} </response>",
            "zero_think": f"<think> {z} </think> <response> {y} </response>"}[think_format]  # fmt: skip


# --- 2. chat rendering

ZERO_INSTRUCTION = {
    "zero_think": (
        "A user asks a question, and an assistant answers it. The assistant first thinks about how to answer well, and "
        "only then answers. The thinking stands between <think> and </think>, and the answer between <response> and "
        "</response>, like this: <think> thinking </think> <response> answer </response>"
    ),
    "zero_plain": (
        "A user asks a question, and an assistant answers it. The answer stands between <response> and </response>, "
        "like this: <response> answer </response>"
    ),
}
_TURNS = (
    "{% for m in messages %}{{ 'Assistant: ' if m.role == 'assistant' else m.role.capitalize() + ': ' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
CHAT_TEMPLATES = {  # none of them drops, moves or adds a word of thinking, and none prints today's date
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "plain": "{{ bos_token if bos_token else '' }}" + _TURNS,
    **{k: "{{ bos_token if bos_token else '' }}" + text + "\n\n" + _TURNS for k, text in ZERO_INSTRUCTION.items()},
}


def _keeps_thinking(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's own template leaves thinking where it is, adds none, and does not change from day to day."""
    user, thought = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>\nZ\n</think>\n\nY"}
    plain, render = {"role": "assistant", "content": "Y"}, tokenizer.apply_chat_template
    return (
        "strftime_now" not in tokenizer.chat_template
        and render([user, thought, user, thought], tokenize=False).count(thought["content"]) == 2
        and "think>" not in render([user, plain], tokenize=False)
        and "think>" not in render([user], tokenize=False, add_generation_prompt=True)
    )


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, think_format: str, chat_template: str = "auto") -> str:
    """Gives a policy's tokenizer its chat template, end of turn (`eos_token`) and a pad token distinct from it.

    `chat_template`: a key of CHAT_TEMPLATES, a path, or `auto`: the Zero template for Zero formats; else the tokenizer's
    own if it keeps thinking verbatim; else ours for its family. Returns one line that says what was done. Raises
    ValueError for a template that drops, adds or prefills thinking and whose family has none of ours.
    """
    vocab = tokenizer.get_vocab()
    if think_format.startswith("zero"):
        name = think_format
    elif chat_template != "auto":
        name = chat_template
    elif tokenizer.chat_template and _keeps_thinking(tokenizer):
        name = "its own"
    else:
        family = {"llama3": "<|start_header_id|>" in vocab, "chatml": "<|im_start|>" in vocab,
                  "plain": not tokenizer.chat_template}  # fmt: skip
        name = next((f for f, fits in family.items() if fits), None)
        if name is None:
            raise ValueError(
                "this tokenizer's chat template drops, adds or prefills thinking (or prints the date); "
                f"pass --chat-template FILE with one that does not, or one of {', '.join(CHAT_TEMPLATES)}"
            )
    if name != "its own":
        tokenizer.chat_template = CHAT_TEMPLATES.get(name) or Path(name).read_text()
    # the end of turn: the first special token that the template writes after the assistant's words
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "@@Y@@"}],
                                         tokenize=False)  # fmt: skip
    after = tokenizer(turn.rpartition("@@Y@@")[2], add_special_tokens=False)["input_ids"]
    end = next((i for i in after if i in tokenizer.all_special_ids), None)
    if end is None:
        raise ValueError("the chat template writes no special token after the assistant's turn, so a model could not learn "
                         "to stop; pass --chat-template FILE with one that does")  # fmt: skip
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        spare = ["<|finetune_right_pad_id|>", "<|endoftext|>", "<|fim_pad|>", "<pad>", "<unk>", "<|pad|>"]
        pad = next((t for t in spare if t in vocab and t != tokenizer.eos_token), None)
        tokenizer.add_special_tokens({"pad_token": pad or "<|pad|>"})
    return f"chat template: {name}; end of turn {tokenizer.eos_token!r}; pad {tokenizer.pad_token!r}"


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> list[int]:
    """Token ids of the conversation up to where the assistant writes: the same in SFT, rollouts and training."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    bos = tokenizer.bos_token_id
    if bos is not None and bos != tokenizer.eos_token_id and ids.count(bos) > 1:
        raise ValueError(f"the rendered prompt holds {ids.count(bos)} BOS tokens; fix the chat template: {ids[:8]}...")
    return ids


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a completion with its end of turn: exactly the tokens that SFT trains on."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


# --- 3. the reward model


class RewardModel:
    """A preference reward model: one scalar for a conversation and what the assistant wrote.

    Any single-logit sequence classifier with its own tokenizer and chat template. `reward_on`: "think+response" scores
    the whole of what the policy wrote, tags included; "response" scores `split_thinking(...).response` where the
    completion is well formed and the text as it is elsewhere (paper, equation 3). Raises ValueError at once for a
    model without chat template or with more than one logit.
    """

    def __init__(self, path: str, reward_on: str = "think+response", think_format: str = "think", chat_template: str = "",
                 max_length: int = 0, tokens_per_batch: int = 16384, device: str = "cpu", dtype: str = "float32"):  # fmt: skip
        self.tokenizer = self.check(path, chat_template)
        self.model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).to(device).eval()
        if self.model.config.num_labels != 1:
            raise ValueError(f"reward model {path} has {self.model.config.num_labels} outputs; it needs exactly 1")
        head = getattr(self.model, "score", None)
        if head is not None and dtype != "float32":  # the scalar itself is computed in float32
            head.float().register_forward_pre_hook(lambda _, args: (args[0].float(),))
        context = getattr(self.model.config, "max_position_embeddings", 0)
        self.max_length = max_length or context or sys.maxsize
        self.reward_on, self.think_format, self.tokens_per_batch = reward_on, think_format, tokens_per_batch
        self.n_scored = self.n_truncated = 0

    @staticmethod
    def check(path: str, chat_template: str = "") -> PreTrainedTokenizerBase:
        """The reward model's tokenizer with its chat template; ValueError when there is none. Loads no weights."""
        tokenizer = AutoTokenizer.from_pretrained(path)
        if chat_template:
            tokenizer.chat_template = Path(chat_template).read_text()
        if not tokenizer.chat_template:
            raise ValueError(f"reward model {path} has no chat template; pass --reward-chat-template FILE (a Jinja file)")
        return tokenizer

    def encode(self, messages: list[dict], completion: str) -> list[int]:
        """Ids of the conversation in the reward model's own template. A text longer than `max_length` tokens loses the
        end of its last turn, never the template's closing tokens; `n_truncated` counts them."""
        specials = [t for t in self.tokenizer.all_special_tokens if t not in TAGS]
        turns = [dict(m) for m in messages] + [{"role": "assistant", "content": completion}]
        for turn in turns:  # a control token inside a text must not open or close a turn
            for token in specials:
                turn["content"] = turn["content"].replace(token, "")
        ids = self.tokenizer.apply_chat_template(turns, return_dict=False)
        self.n_scored += 1
        if len(ids) > self.max_length:
            self.n_truncated += 1
            shorter = self.tokenizer.apply_chat_template(turns[:-1] + [{"role": "assistant", "content": "@@"}], tokenize=False)
            tail = self.tokenizer(shorter.rpartition("@@")[2], add_special_tokens=False)["input_ids"]
            ids = ids[: self.max_length - len(tail)] + tail
        return ids

    def score(self, prompts: list[list[dict]], completions: list[str]) -> list[float]:
        """Rewards (B,) of completions (raw text of the policy) to prompts (lists of messages), in their order."""
        texts = list(completions)
        if self.reward_on == "response":
            parts = [split_thinking(t, self.think_format) for t in texts]
            texts = [p.response if p.status == "ok" else t for p, t in zip(parts, texts)]
        return self.score_ids([self.encode(m, t) for m, t in zip(prompts, texts, strict=True)])

    @torch.inference_mode()
    def score_ids(self, ids: list[list[int]]) -> list[float]:
        """Rewards (B,) of rendered conversations (token ids): the head's output at the last token of each."""
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
        scores, start = [0.0] * len(ids), 0
        while start < len(order):  # rows of about equal length, a bounded number of tokens
            width = len(ids[order[start]])
            rows = order[start : start + max(1, self.tokens_per_batch // width)]
            start += len(rows)
            # A pad id that stands in no row: the token the head reads is then the last real one of every row, as by
            # the attention mask, even where the tokenizer's pad token is its end of turn.
            used = {i for r in rows for i in ids[r]}
            pad = next(i for i in range(len(used) + 1) if i not in used)
            self.model.config.get_text_config().pad_token_id = self.model.config.pad_token_id = pad
            batch = torch.tensor([ids[r] + [pad] * (width - len(ids[r])) for r in rows])
            mask = torch.tensor([[1] * len(ids[r]) + [0] * (width - len(ids[r])) for r in rows])
            device = self.model.device
            for r, s in zip(rows, self.model(batch.to(device), attention_mask=mask.to(device)).logits[:, 0].tolist()):
                scores[r] = s
        return scores


# --- 4. generation (evaluation and offline sampling; RL rollouts are TRL's, see rollout.py)


def generate(model: str, prompts: list[list[int]], tokenizer: PreTrainedTokenizerBase, temperature: float, max_tokens: int,
             top_p: float = 1.0, use_vllm: bool = False, seed: int = 0, batch_size: int = 64, stop: str = "",
             vllm_memory: float = 0.85) -> list[tuple[str, bool, int]]:  # fmt: skip
    """One completion for each of the prompts (token ids), in their order: (text, finished, number of tokens).

    Every sampling parameter is given here, none is taken from the model's generation_config.json. Temperature 0 is greedy.
    `finished` is False where `max_tokens` cut it off. Completions end at the tokenizer's end of turn, or at `stop`.
    """
    eos = tokenizer.eos_token_id
    if use_vllm:
        from vllm import LLM, SamplingParams

        context = max(map(len, prompts)) + max_tokens
        engine = LLM(model=model, max_model_len=context, gpu_memory_utilization=vllm_memory, seed=seed, generation_config="vllm",
                     **({} if torch.cuda.is_available() else {"dtype": "float32", "enforce_eager": True}))  # fmt: skip
        params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop_token_ids=[eos], seed=seed,
                                stop=[stop] if stop else None, include_stop_str_in_output=True)  # fmt: skip
        outs = engine.generate([{"prompt_token_ids": p} for p in prompts], params)
        ids = [list(o.outputs[0].token_ids) for o in outs]
        stopped = [o.outputs[0].finish_reason == "stop" for o in outs]
    else:
        on_gpu = torch.cuda.is_available()
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if on_gpu else torch.float32).eval()
        policy.to("cuda" if on_gpu else "cpu")
        torch.manual_seed(seed)
        sampling = dict(do_sample=True, temperature=temperature, top_p=top_p, top_k=0) if temperature else dict(do_sample=False)
        policy.generation_config = GenerationConfig(**sampling, max_new_tokens=max_tokens, eos_token_id=eos,
                                                    pad_token_id=tokenizer.pad_token_id, stop_strings=[stop] if stop else None)  # fmt: skip
        ids, order = [[] for _ in prompts], sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for start in tqdm(range(0, len(order), batch_size), "generate", unit="batch"):
            rows = order[start : start + batch_size]
            batch = tokenizer.pad({"input_ids": [prompts[r] for r in rows]}, padding_side="left", return_tensors="pt")
            out = policy.generate(**batch.to(policy.device), tokenizer=tokenizer)[:, batch["input_ids"].size(1) :]
            for r, row in zip(rows, out.tolist()):
                ids[r] = row[: row.index(eos) + 1] if eos in row else row
        stopped = [i[-1] == eos or (bool(stop) and stop in tokenizer.decode(i)) for i in ids]
    texts = [tokenizer.decode(i[:-1] if i and i[-1] == eos else i, skip_special_tokens=False) for i in ids]
    return [(text, end, len(i)) for text, end, i in zip(texts, stopped, ids)]
