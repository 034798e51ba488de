"""Samples from a vLLM engine on this machine, in this process or in a process of its own.

Training loops have it in their own process, where it takes over the policy's weights. DPO rounds, evaluations and
local judges start a process for it, whose end gives all GPU memory back.
"""

import contextlib
import gc
import logging
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator

import runs  # noqa: F401  # first: it sets environment variables that the libraries below read  # isort: skip
import torch
from accelerate import PartialState

import policy
import utils
import watchdog


class Engine:
    """A vLLM engine with the weights of `model`.

    Args:
        max_length: tokens of the longest prompt and completion together.
        memory: share of the GPU that vLLM reserves.
        in_process: whether vLLM runs in this process; `update` needs that.
        sleeps: whether `sleep` frees vLLM's memory.
    """

    def __init__(self, model: str, max_length: int | None, memory: float, in_process: bool, sleeps: bool):
        from vllm import LLM  # seconds to import

        gc.collect()
        torch.cuda.empty_cache()  # what torch holds on to is missing in vLLM's pool
        on_gpu = utils.DEVICE == "cuda"
        self.in_process = in_process
        self.sleeps = sleeps and on_gpu  # vLLM cannot sleep on a CPU
        self.asleep = False
        options = {
            "model": model,
            "dtype": utils.DTYPE,
            "load_format": "safetensors",
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
            "enforce_eager": not on_gpu,
            "max_model_len": max_length,
            "gpu_memory_utilization": memory,
            "enable_sleep_mode": self.sleeps,
        }
        if not on_gpu:
            # a seeded request whose prompt is split among batches fails on a CPU
            options["enable_chunked_prefill"] = False
        if in_process:
            if PartialState().num_processes > 1:
                options["distributed_executor_backend"] = "external_launcher"
                options["seed"] = PartialState().process_index
            self.llm = LLM(**options)
        else:
            with _process_of_its_own():
                self.llm = LLM(**options)
            core = self.llm.llm_engine.engine_core
            threading.Thread(target=_wake_when_dead, args=(core,), daemon=True).start()
        self.sleep()

    def complete(self, requests: dict[int, dict]) -> Iterator[tuple[int, list[int], list[float], bool]]:
        """Yields (place, token ids, log-probabilities, finished) as completions end.

        `requests`: place -> prompt (token ids) and parameters. `finished` is False if the token limit cut
        the completion off. RuntimeError if vLLM's process has died.
        """
        import zmq
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = self.llm.llm_engine
        try:
            for place, request in requests.items():
                parameters = dict(request)
                prompt = {"prompt_token_ids": parameters.pop("prompt")}
                detokenize = bool(parameters["stop"])
                engine.add_request(str(place), prompt, SamplingParams(**parameters, detokenize=detokenize))
            while engine.has_unfinished_requests():
                watchdog.beat()
                for request in engine.step():
                    if not request.finished:
                        continue
                    output = request.outputs[0]
                    ids = list(output.token_ids)
                    logprobs = []
                    for token, likeliest in zip(ids, output.logprobs, strict=True):
                        logprobs.append(likeliest[token].logprob)
                    yield int(request.request_id), ids, logprobs, output.finish_reason == "stop"
        except (EngineDeadError, zmq.ZMQError) as error:  # vLLM closes the sockets of a dead process
            raise RuntimeError(
                "vLLM's engine process died; if it printed no error, it was killed, most likely as memory ran out"
            ) from error

    def update(self, trained: torch.nn.Module) -> None:
        """Copies the policy's weights into this process's engine; all processes must call it."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        weights = policy.whole_weights(trained)
        if utils.DEVICE == "cuda":
            self.llm.apply_model(lambda model: model.load_weights(weights))  # untested: needs a GPU
        else:  # linear layers pack their weights after loading, which load_weights alone does not do
            # it warns of layers that get no weights: rotary embeddings, and the tied LM head, which _pack_tied_head renews
            logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.llm.apply_model(_pack_tied_head)
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Gives vLLM's memory back until the next `update`; untested, as it needs a GPU."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)  # weights are dropped: the next ones come by update
            self.asleep = True

    def close(self) -> None:
        """Frees the engine. Its process ends if it has its own, and with it the GPU memory."""
        core = self.llm.llm_engine.engine_core
        core.shutdown()
        if not self.in_process:  # vLLM may kill its process, and does not wait for the end
            for process in core.resources.engine_manager.processes:
                process.join(timeout=60)
        self.llm = None


@contextlib.contextmanager
def _process_of_its_own():
    """Makes vLLM start its engine in another process, on this process's GPU, outside the launched group."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("TORCHELASTIC", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # runs.py sets 0
    if torch.cuda.is_available():
        all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
        visible = before.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[PartialState().local_process_index]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wake_when_dead(engine_core) -> None:
    """Waits until vLLM's process ends, then lets `step` raise; vLLM 0.31 would wait for output for ever."""
    from vllm.v1.engine.exceptions import EngineDeadError

    multiprocessing.connection.wait(engine_core.resources.engine_manager.sentinels())
    engine_core.outputs_queue.put(EngineDeadError())


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Renews the packed copy of a tied LM head, which vLLM's reload leaves stale on a CPU."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
