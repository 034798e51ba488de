"""The flags that the evaluation scripts share: of the tested model, of its answers to tasks, of a judge and
of the run."""

from dataclasses import dataclass
from typing import Literal

from rlmt.foreign import FOREIGN_STYLES
from utils import THINK_FORMATS


@dataclass
class ModelFlags:
    # model
    model: str = ""
    """Folder or hub name of the model to evaluate; with --model-url, the name that the endpoint knows, or the
    folder that a server of vLLM has loaded: `python -m rlmt.vllm --model FOLDER` starts one."""
    model_url: str = ""
    """OpenAI-compatible endpoint that generates, e.g. http://localhost:8000/v1; empty: generate here."""
    model_omit: tuple[str, ...] = ()
    """Parameters that are left out of requests to --model-url, as its server refuses them."""
    limit: int = 0
    """Use only the first tasks, or users; 0: all."""
    think_format: Literal["auto", *THINK_FORMATS, *FOREIGN_STYLES] = "auto"
    """auto: what the model's think_format.json says, else what its chat template shows: tags (Qwen3, R1),
    channels (gpt-oss), gemma or plain. Behind an endpoint and of stored answers: plain. If it was a guess,
    thinking ends the run."""
    chat_template: str = "auto"
    """auto: the model's own. Or chatml, llama3, plain, or a Jinja file, which is used as it is. With a Zero
    format also a text file, the instruction before the prompt. Behind an endpoint the server applies its
    own."""
    chat_template_args: tuple[str, ...] = ()
    """Arguments of the chat template, KEY=VALUE, such as enable_thinking=false or reasoning_effort=high."""
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM if there is a GPU and vLLM is installed, else transformers."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of every model that runs here; auto: bfloat16 on a GPU, float32 on a CPU."""
    top_p: float = 1.0
    """Nucleus sampling; 1 samples from the full distribution. The paper's evaluation uses 0.95."""
    max_tokens: int = 8192
    """New tokens per answer; with the longest prompt they must fit the model's context. The paper's
    evaluation uses 8192 with thinking, 4096 without."""
    batch_size: int = 64
    """Tasks, or dialogues, per batch with transformers."""
    tensor_parallel: int = 1
    """GPUs of one engine, for a model that one GPU does not hold."""


@dataclass
class AnswerFlags(ModelFlags):
    """Of a model that answers tasks, one by one."""

    # model
    max_thinking_tokens: int = 0
    """Tokens of thinking, after which it is closed and the model goes on with its answer; 0: no limit."""
    reward_model: str = ""
    """Also score every answer in good format by this reward model; its mean is reported as the proxy."""
    reward_on: Literal["think+response", "response"] = "think+response"
    """What that reward model reads."""
    generate_only: bool = False
    """Write the answers and ask no judge; the same command with --resume in its place goes on."""


@dataclass
class EvaluationFlags:
    # endpoints: judge, simulated user
    key_env: tuple[str, ...] = ()
    """HOST=NAME words: the environment variable NAME holds the key for the endpoint at that host, or
    HOST:PORT. Without a word for its host, only the OpenAI API and OPENAI_BASE_URL get OPENAI_API_KEY, others
    no key."""
    omit: tuple[str, ...] = ()
    """Parameters that are left out of requests to judge and simulated users, as their server refuses them:
    seed temperature."""
    budget: float = 0.0
    """US dollars that the judge may cost, and each simulated user; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars per million tokens that these read and write."""
    # run
    config: str = ""
    """config.json of an earlier run of this script: its arguments, without --out, --resume and --overwrite;
    flags override them."""
    seed: int = 0
    """Random seed for sampling, for drawn orders and for intervals. Behind --model-url, 0 sends no seed with
    the first answer to a prompt."""
    out: str = ""
    """Run folder; empty: <script>__<model>__s<seed>__<hash of the arguments>, beside the run that made the
    model, else in results/. Of stored rows, the file for their numbers."""
    resume: bool = False
    """Keep what a run folder already has: what was generated, and every reply of a judge or simulated
    user."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments, data, model and judge (by its first request), print the number of calls and an
    estimate of their cost, and stop."""


@dataclass
class JudgeFlags(EvaluationFlags):
    # judge, simulated user
    judge: str = ""
    """A model's name at --judge-url; local:FOLDER or local:HUB-NAME to run it here; or, where a program can
    judge, file.py:function."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: OPENAI_BASE_URL, else the official one."""
    template: str = ""
    """File with the judge's instructions, used verbatim; empty: our own wording. A folder where there are
    several. Of a benchmark without a judge, the authors' program that makes its prompts."""
    judge_max_tokens: int = 1024
    """Tokens of a judge's reply; one that thinks needs more."""
    judge_tensor_parallel: int = 1
    """GPUs of one engine of a judge `local:...`; --data-parallel is for its engines too."""
    data_parallel: int = 0
    """Engines of vLLM at most, which share the requests; 0: as many as the GPUs allow, on a CPU one."""
    concurrency: int = 32
    """Calls of an endpoint at a time."""
    max_invalid: float = 0.01
    """Share of invalid rows (verdicts, dialogues without a score) above which there is no headline."""
