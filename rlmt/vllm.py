"""Samples by vLLM: `Engine` in this process, `serve` as a server on this machine, `Server` from any server of
vLLM.

Training loops have an engine in their own process, where it can copy the policy's weights. Saved models are
sampled by a server, in DPO rounds, evaluations and as local judges: when it ends, all its GPU memory is free.

    python -m rlmt.vllm --model FOLDER    # a server for several commands: prints its URL, for their --model-url
"""

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState

from rlmt.chat import Sample
from rlmt.endpoint import hide_key, key_for, open_client
from rlmt.learner import whole_weights
from utils import DEVICE, compute_dtype, fail, in_one_line, wants_vllm


def parameters_of(sampling, ends: list[int]) -> dict:
    """Returns vLLM's names for a Sampling of rlmt/sampler.py and the ids that end a turn."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": ends,
        "ignore_eos": True,  # stop_token_ids has every end
        "stop": [sampling.stop] if sampling.stop else [],
        "include_stop_str_in_output": True,
    }


# --- 1. an engine in this process, for a policy that is trained


class Engine:
    """A vLLM engine with the weights of `model`, in this process.

    Args:
        max_length: tokens of the longest prompt and completion together; None: the model's context.
        memory: share of each GPU that vLLM reserves.
        n_sequences: completions that are sampled at once.
        dtype: that of weights and computation, see utils.compute_dtype.
    """

    batch_size = None  # it takes all prompts at once

    def __init__(
        self,
        model: str,
        max_length: int | None,
        memory: float,
        n_sequences: int,
        dtype: str = "auto",
    ):
        from vllm import LLM  # seconds to import

        gc.collect()
        torch.cuda.empty_cache()  # vLLM cannot take what torch keeps
        on_gpu = DEVICE == "cuda"
        self.asleep = False
        options = {
            "model": model,
            "dtype": compute_dtype(dtype),
            "load_format": "dummy",  # the first `update` brings the weights
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",  # after temperature and top-p, as it samples
            "enforce_eager": not on_gpu,
            # on a CPU a seeded request fails whose prompt is split among batches
            "enable_chunked_prefill": on_gpu,
            "max_model_len": max_length,
            "max_num_seqs": n_sequences,
            "gpu_memory_utilization": memory,
            "enable_sleep_mode": on_gpu,  # vLLM cannot sleep on a CPU
            "seed": PartialState().process_index,
        }
        if PartialState().num_processes > 1:
            # vLLM starts no processes of its own: each of this launch samples its own prompts
            options["distributed_executor_backend"] = "external_launcher"
        self.llm = LLM(**options)
        self.sleep()  # until `update` brings the weights to sample from

    def complete(
        self, prompts: dict[int, list[int]], seeds: dict[int, int], sampling, ends: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Yields (index, sample) as completions end.

        `prompts`: token ids by index. `seeds`: by index, or empty.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = parameters_of(sampling, ends)
        parameters["logprobs"] = 0  # the sampled token's only
        parameters["detokenize"] = bool(sampling.stop)
        parameters["output_kind"] = RequestOutputKind.FINAL_ONLY
        engine = self.llm.llm_engine
        for index, prompt in prompts.items():
            request = SamplingParams(**parameters, seed=seeds.get(index))
            engine.add_request(str(index), {"prompt_token_ids": prompt}, request)
        while engine.has_unfinished_requests():
            for result in engine.step():
                output = result.outputs[0]
                logprobs = []
                for token, logprob_of in zip(output.token_ids, output.logprobs, strict=True):
                    logprobs.append(logprob_of[token].logprob)
                sample = Sample(list(output.token_ids), logprobs, output.finish_reason == "stop")
                yield int(result.request_id), sample

    def update(self, trained: torch.nn.Module) -> None:
        """Copies the policy's weights into this process's engine; all processes must call it."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        weights = whole_weights(trained)
        if DEVICE == "cuda":
            self.llm.apply_model(lambda model: model.load_weights(weights))
        else:  # linear layers on a CPU keep packed weights, which load_weights alone does not renew
            # it warns of layers without weights: rotary embeddings, and the tied LM head, renewed below
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.llm.apply_model(_pack_tied_head)
        if self.asleep:
            torch.cuda.empty_cache()  # it holds the weights that were gathered and merged
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Frees vLLM's memory until the next `update`; a CPU cannot."""
        if DEVICE == "cuda" and not self.asleep:
            self.llm.sleep(level=2)  # weights are dropped: the next ones come by update
            self.asleep = True

    def close(self) -> None:
        """Stops the engine and frees its memory."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Renews the packed copy of a tied LM head, which vLLM's reload on a CPU leaves as it was."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


# --- 2. a server, for a saved model

# when its input ends, as this process has ended or wants the server gone, it kills the server and all of its
# processes
KEEPER = 'read -r _; kill -s KILL -- "-$0"'
MAX_RETRIES = 6  # of a request; openai waits half a second, then twice as long each time, at most 8 seconds
SECONDS_TO_END = 20  # for a server to end by itself; then its keeper kills it


def choose_gpus(tensor_parallel: int, data_parallel: int) -> tuple[int, list[str]]:
    """Returns how many engines a server gets, and its GPUs, as CUDA_VISIBLE_DEVICES names them; none on a
    CPU.

    `data_parallel`: engines at most; 0: as many as there are GPUs for, or 1 on a CPU. In an accelerated
    launch each process leaves the first GPUs to the processes before it. vLLM says if there are too few.
    """
    if not torch.cuda.is_available():
        return data_parallel or 1, []
    all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
    first = PartialState().local_process_index * tensor_parallel
    n_engines = max(1, (len(visible) - first) // tensor_parallel)
    if data_parallel:
        n_engines = min(n_engines, data_parallel)
    return n_engines, visible[first : first + n_engines * tensor_parallel]


@contextlib.contextmanager
def serve(
    model: str,
    log: Path,
    max_length: int | str = "auto",
    memory: float = 0.85,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    dtype: str = "auto",
) -> Iterator[str]:
    """Starts a server of a saved model on this machine, yields its URL when it answers, and ends it at exit.

    The server ends with this process, also after kill -9. If it ends by itself, the run does so too, by one
    line and with code 2.

    Args:
        log: file for what the server prints.
        max_length: tokens of the longest prompt and completion together; "auto": what memory and model allow.
        memory: share of each GPU that vLLM reserves.
        tensor_parallel, data_parallel: GPUs of an engine, and engines; see `choose_gpus`.
        dtype: that of weights and computation, see utils.compute_dtype.
    """
    n_engines, gpus = choose_gpus(tensor_parallel, data_parallel)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    words += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    words += ["--dtype", compute_dtype(dtype), "--load-format", "safetensors", "--generation-config", "vllm"]
    words += ["--max-model-len", str(max_length), "--gpu-memory-utilization", str(memory)]
    words += ["--tensor-parallel-size", str(tensor_parallel), "--data-parallel-size", str(n_engines)]
    if DEVICE != "cuda":  # as in Engine
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]

    # a proxy of the environment is for other machines
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    os.environ["no_proxy"] = f"{others},127.0.0.1"
    with open(log, "w") as file:
        server = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=_environment_of_server(gpus),
            start_new_session=True,  # so Ctrl-C does not reach it, and its keeper can kill all of its processes
        )
    keeper = subprocess.Popen(
        ["sh", "-c", KEEPER, str(server.pid)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # no complaint if all have ended
        start_new_session=True,
    )
    print(f"waits for vLLM's server of {model}; its log is {log}", file=sys.stderr, flush=True)
    is_wanted = True

    def end_run() -> None:
        """Ends this process if the server ends too early: who waits for replies would wait in vain."""
        code = server.wait()
        if is_wanted:
            print(
                f"\nerror: vLLM's server of {model} has ended (exit code {code}; -9 if memory ran out); see {log}",
                file=sys.stderr,
            )
            sys.stdout.flush()
            os._exit(2)  # a thread cannot end the others; whatever is done is on disk

    threading.Thread(target=end_run, daemon=True).start()
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        is_wanted = False
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(SECONDS_TO_END)
        keeper.stdin.close()
        keeper.wait()
        server.wait()


def _environment_of_server(gpus: list[str]) -> dict[str, str]:
    """Returns this process's environment with the server's GPUs, and without an accelerated launch."""
    environment = dict(os.environ)
    for name in os.environ:
        if name.startswith(("TORCHELASTIC", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE")):
            del environment[name]
    environment["VLLM_LOGGING_LEVEL"] = "INFO"  # its log tells of loading and warm-up
    if DEVICE == "cuda":  # on a CPU a process of its own for the worker starts later, and samples more slowly
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork cannot use CUDA after its parent did
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


@dataclass
class Server:
    """Samples from a vLLM server, of `serve` or somebody else's, by token ids. It must serve `model` by that
    name.

    Requests that fail for a while are sent again; one that is refused or stays without a reply exits with 2.
    """

    model: str
    base_url: str
    """Such as http://localhost:8000/v1."""
    key_env: tuple[str, ...] = ()
    """See rlmt/endpoint.py."""
    batch_size = None  # it takes all prompts at once

    def complete(
        self, prompts: dict[int, list[int]], seeds: dict[int, int], sampling, ends: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Yields what Engine.complete yields, without log-probabilities."""
        from aiohttp import ClientError
        from openai import APIError

        body = {"model": self.model, "return_token_ids": True, **parameters_of(sampling, ends)}
        # of somebody else's server, which may take its defaults from the model's generation config
        body |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        key = key_for(self.base_url, self.key_env)
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # each of its connections is a file

        async def ask(index: int) -> tuple[int, Sample]:
            request = body | {"prompt": prompts[index], "seed": seeds.get(index)}
            reply = await client.post("/completions", cast_to=str, body=request)
            try:
                choice = json.loads(reply)["choices"][0]
                if choice["finish_reason"] not in ("stop", "length"):
                    raise ValueError(choice["finish_reason"])
                return index, Sample(choice["token_ids"], None, choice["finish_reason"] == "stop")
            except (ValueError, LookupError, TypeError) as error:
                raise ClientError(f"no completion in HTTP 200: {reply}") from error

        with asyncio.Runner() as runner:
            client = open_client(self.base_url, key).with_options(max_retries=MAX_RETRIES)
            # all at once: the server has a queue
            requests = [runner.get_loop().create_task(ask(index)) for index in prompts]
            try:
                for reply in asyncio.as_completed(requests):
                    yield runner.run(reply)
            except (APIError, ClientError) as error:
                fail(
                    f"{self.base_url}: {hide_key(in_one_line(error), key)}; it must be vLLM's server of {self.model}; the same command with "
                    "--resume goes on"
                )
            finally:
                runner.run(client.close())

    def close(self) -> None:
        """Does nothing: who started the server ends it."""


# --- 3. a server for several commands, as experiments/evaluate.sh starts one


def main(
    model: str,
    log: Path = Path("vllm.log"),
    rollout: str = "auto",
    dtype: str = "auto",
    tensor_parallel: int = 1,
    data_parallel: int = 0,
) -> None:
    """Prints the URL of a server and keeps it until the parent ends; an empty line if vLLM is not wanted.

    Args:
        model: folder or hub name.
        log: file for what the server prints.
        rollout, dtype, tensor_parallel, data_parallel: as in the evaluation scripts.
    """
    parent = os.getppid()
    if not wants_vllm(rollout):
        print(flush=True)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with serve(model, log, dtype=dtype, tensor_parallel=tensor_parallel, data_parallel=data_parallel) as url:
        print(url, flush=True)
        while os.getppid() == parent:
            time.sleep(1)


if __name__ == "__main__":
    import tyro

    tyro.cli(main, return_unknown_args=True)
