"""Samples from vLLM engines on this machine: `Engine` in this process, `Engines` in processes of their own.

Training loops have an engine in their own process, where it can copy the policy's weights. DPO rounds, evaluations
and local judges start a process for each engine: when it ends, all its GPU memory is free.
"""

import atexit
import contextlib
import gc
import logging
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator

import torch
from accelerate import PartialState

from rlmt.model import whole_weights
from utils import DEVICE, compute_dtype, fail

START_METHOD = "spawn"  # of engines' processes: a forked one could not use CUDA if this one has

# --- 1. an engine in this process


class Engine:
    """A vLLM engine with the weights of `model`, in this process.

    Args:
        max_length: tokens of the longest prompt and completion together; None: the model's context.
        memory: share of each GPU that vLLM reserves.
        sleeps: whether `sleep` frees vLLM's memory.
        tensor_parallel: GPUs that share the weights; from 2 on vLLM starts a process for each.
        dtype: that of weights and computation, see utils.compute_dtype.
    """

    def __init__(
        self,
        model: str,
        max_length: int | None,
        memory: float,
        sleeps: bool = False,
        tensor_parallel: int = 1,
        dtype: str = "auto",
    ):
        from vllm import LLM  # seconds to import

        gc.collect()
        torch.cuda.empty_cache()  # vLLM cannot take what torch keeps
        on_gpu = DEVICE == "cuda"
        self.sleeps = sleeps and on_gpu  # vLLM cannot sleep on a CPU
        self.asleep = False
        options = {
            "model": model,
            "dtype": compute_dtype(dtype),
            "load_format": "safetensors",
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",  # after temperature and top-p, as it samples
            "enforce_eager": not on_gpu,
            "max_model_len": max_length,
            "gpu_memory_utilization": memory,
            "enable_sleep_mode": self.sleeps,
            "tensor_parallel_size": tensor_parallel,
        }
        if not on_gpu:
            # a seeded request whose prompt is split among batches fails on a CPU
            options["enable_chunked_prefill"] = False
        if PartialState().num_processes > 1:
            # vLLM starts no processes of its own: each of this launch samples its own prompts
            options["distributed_executor_backend"] = "external_launcher"
            options["seed"] = PartialState().process_index
        self.llm = LLM(**options)
        self.sleep()  # until `update` brings the weights to sample from

    def complete(self, requests: dict[int, dict]) -> Iterator[tuple[int, list[int], list[float], bool]]:
        """Yields (place, token ids, log-probabilities, finished) as completions end.

        `requests`: place -> prompt (token ids) and parameters; `budget`, if there is one, is a ThinkingBudget.
        `finished` is False if the token limit cut the completion off.
        """
        engine = self.llm.llm_engine
        budgets = {}
        for place, request in requests.items():
            self._add(place, request)
            if "budget" in request:
                budgets[place] = request["budget"]
        closed = {}  # place -> ids and log-probabilities up to where a budget closed the thinking
        while engine.has_unfinished_requests():
            results = engine.step()
            for result in results:
                place = int(result.request_id)
                output = result.outputs[0]
                if result.finished:
                    ids, logprobs = closed.get(place, ([], []))
                    ids = ids + list(output.token_ids)
                    logprobs = logprobs + _logprobs(output)
                    yield place, ids, logprobs, output.finish_reason == "stop"
                elif place in budgets and len(output.token_ids) >= budgets[place].close_at:
                    del budgets[place]
                    closed[place] = self._close_thinking(place, requests[place], output)

    def _add(self, place: int, request: dict) -> None:
        """Gives vLLM a request of `complete`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = {name: value for name, value in request.items() if name not in ("prompt", "budget")}
        parameters["detokenize"] = bool(parameters["stop"])
        if "budget" not in request:  # saves a copy of the completion after each token
            parameters["output_kind"] = RequestOutputKind.FINAL_ONLY
        prompt = {"prompt_token_ids": request["prompt"]}
        self.llm.llm_engine.add_request(str(place), prompt, SamplingParams(**parameters))

    def _close_thinking(self, place: int, request: dict, output) -> tuple[list[int], list[float]]:
        """Ends a request at its thinking budget and adds one that goes on behind the closed thinking.

        Returns ids and log-probabilities up to there; two empty lists if there is nothing to close.
        """
        budget = request["budget"]
        thought = list(output.token_ids)[: budget.close_at]
        closing = budget.closing_after(thought, self.llm.get_tokenizer())
        if not closing:
            return [], []
        ids = thought + closing
        n_left = request["max_tokens"] - len(ids)
        self.llm.llm_engine.abort_request([str(place)])
        self._add(place, request | {"prompt": request["prompt"] + ids, "max_tokens": n_left})
        logprobs = _logprobs(output)[: budget.close_at]
        return ids, logprobs + [0.0] * len(closing)  # forced tokens have probability 1

    def update(self, trained: torch.nn.Module) -> None:
        """Copies the policy's weights into this process's engine; all processes must call it."""
        if self.asleep:
            torch.cuda.empty_cache()  # vLLM 0.24.0 cannot take what torch keeps; 0.31 empties the cache itself
            self.llm.wake_up(tags=["weights"])
        weights = whole_weights(trained)
        if DEVICE == "cuda":
            self.llm.apply_model(lambda model: model.load_weights(weights))  # untested: needs a GPU
        else:  # linear layers on a CPU keep packed weights, which load_weights alone does not renew
            # reload_weights warns of layers without weights: rotary embeddings, and the tied LM head (renewed below)
            logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.llm.apply_model(_pack_tied_head)
        if self.asleep:
            torch.cuda.empty_cache()  # it holds the weights that were gathered and merged
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Frees vLLM's memory until the next `update`; untested, as it needs a GPU."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)  # weights are dropped: the next ones come by update
            self.asleep = True

    def close(self) -> None:
        """Stops the engine, and the processes of tensor parallelism."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None


def _logprobs(output) -> list[float]:
    """Returns the log-probability of each sampled token of a completion by vLLM."""
    logprobs = []
    for token, logprob_of in zip(output.token_ids, output.logprobs, strict=True):
        logprobs.append(logprob_of[token].logprob)
    return logprobs


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Renews the packed copy of a tied LM head, which vLLM's reload on a CPU leaves as it was."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


# --- 2. engines in processes of their own


def gpu_groups(tensor_parallel: int = 1, at_most: int = 1) -> list[list[str]]:
    """Returns the GPUs of each engine, as CUDA_VISIBLE_DEVICES names them. Without a GPU every name is "CPU".

    Makes as many groups as the GPUs allow, but no more than `at_most`; 0 is no limit, or one group on a CPU.
    In an accelerated launch process k takes groups k, k+1, …, as each earlier process has one. Exits with 2 if no
    group is left.
    """
    if not torch.cuda.is_available():
        return [["CPU"] * tensor_parallel for _ in range(at_most or 1)]
    all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
    n_groups = len(visible) // tensor_parallel
    groups = [visible[i * tensor_parallel : (i + 1) * tensor_parallel] for i in range(n_groups)]
    groups = groups[PartialState().local_process_index :]
    if not groups:
        fail(
            f"only {len(visible)} GPUs are visible; lower --tensor-parallel or --judge-tensor-parallel {tensor_parallel}"
        )
    if at_most:
        groups = groups[:at_most]
    return groups


class Engines:
    """vLLM engines with the weights of `model`, each in a process of its own; they share the requests.

    Args:
        max_length, memory, dtype: as for Engine.
        gpus: those of each engine, see `gpu_groups`.

    Raises RuntimeError if a process dies, while models load or in `complete`.
    """

    def __init__(
        self,
        model: str,
        max_length: int | None,
        memory: float,
        gpus: list[list[str]],
        dtype: str = "auto",
    ):
        if len(gpus) > 1:
            print(f"vLLM: {len(gpus)} engines:", ", ".join("+".join(group) for group in gpus), flush=True)
        options = {
            "model": model,
            "max_length": max_length,
            "memory": memory,
            "tensor_parallel": len(gpus[0]),
            "dtype": dtype,
        }
        context = multiprocessing.get_context(START_METHOD)
        self.processes = {}  # connection -> process
        self.busy = set()  # connections of processes that load a model or sample
        atexit.register(self.close)  # else the interpreter waits at its end for the processes
        for group in gpus:
            connection, other_end = context.Pipe()
            process = context.Process(target=_serve, args=(other_end, options))
            with _environment_of_engine(group):
                process.start()
            other_end.close()
            self.processes[connection] = process
            self.busy.add(connection)
        list(self._replies())  # empty; waits until all have loaded the model

    def complete(self, requests: dict[int, dict]) -> Iterator[tuple[int, list[int], list[float], bool]]:
        """Yields what Engine.complete yields, from all engines as it comes."""
        for number, connection in enumerate(self.processes):
            places = list(requests)[number :: len(self.processes)]
            with contextlib.suppress(OSError):  # if the process has died, _replies says so
                connection.send({place: requests[place] for place in places})
        self.busy = set(self.processes)
        yield from self._replies()

    def _replies(self) -> Iterator[tuple[int, list[int], list[float], bool]]:
        """Yields what the busy processes send, until each has sent None."""
        while self.busy:
            # a dead process's pipe stays open while a process lives that vLLM forked from it, so look every second
            for connection in multiprocessing.connection.wait(self.busy, timeout=1):
                try:
                    reply = connection.recv()
                except (EOFError, OSError):
                    self.processes[connection].join(timeout=10)
                    continue
                if reply is None:
                    self.busy.remove(connection)
                else:
                    yield reply
            for number, process in enumerate(self.processes.values(), 1):
                if process.exitcode is not None:
                    raise RuntimeError(
                        f"vLLM's engine process died ({number} of {len(self.processes)}, exit code {process.exitcode}); "
                        "if it printed no error, it was killed, most likely as memory ran out"
                    )

    def close(self) -> None:
        """Ends the processes, and so frees their GPU memory. If one is still busy, all are killed."""
        for connection, process in self.processes.items():
            connection.close()  # ends a process that waits for requests
            if self.busy:
                process.kill()
        for process in self.processes.values():
            process.join(timeout=60)
            process.kill()  # does nothing if it has ended
            process.join()
        self.processes = {}


@contextlib.contextmanager
def _environment_of_engine(gpus: list[str]):
    """Sets an engine's GPUs in the environment, and hides the accelerated launch, while its process starts."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("TORCHELASTIC", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    if torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(connection, options: dict) -> None:
    """Runs an engine: sends None when the model is loaded; answers each dictionary by its completions, then None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    engine = Engine(**options)
    connection.send(None)
    while True:
        try:
            requests = connection.recv()
        except EOFError:  # Engines.close was called
            break
        for completion in engine.complete(requests):
            connection.send(completion)
        connection.send(None)
    engine.close()


def _end_with_parent() -> None:
    """Ends this process with its parent, even after kill -9; else it would keep the GPU's memory."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
