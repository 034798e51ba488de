"""Samples from a vLLM server on other GPUs, instead of an engine on the GPUs that train.

Start the server with the model that the run starts from, and the run with --vllm-server-url http://HOST:8000:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm --logprobs-mode processed_logprobs \\
        --dtype bfloat16 --weight-transfer-config '{"backend": "nccl"}'

`--dtype` is that of the run. VLLM_SERVER_DEV_MODE opens routes by which anybody who reaches the port can change
the model; keep the port to your machines. Completions come over HTTP. Weights go over NCCL, by vLLM's weight
transfer (https://docs.vllm.ai/en/latest/training/weight_transfer/), which is untested: it needs two GPUs.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import runs  # first: it sets environment variables that the libraries below read  # isort: skip
import numpy as np
import requests
import torch
from accelerate import PartialState

import api_keys
import policy
import watchdog

REQUESTS_AT_ONCE = 512  # of one process; the server queues what it cannot take
# replies come in parts of 16 tokens, as each part tells the watchdog that the run makes progress
STREAM = {"stream": True, "stream_interval": 16, "return_token_ids": True}


class Server:
    """A vLLM server. Every process samples its own prompts from it; the main process sends it the weights.

    Args:
        url: http://HOST:PORT
        max_length: tokens of the longest prompt and completion together.
        key_env: words HOST=NAME of --key-env, for a server with --api-key; see api_keys.py.

    Exits with 2 if no server answers, if it was started in another way than the run needs, or if the run's vLLM
    cannot send weights to it.
    """

    def __init__(self, url: str, max_length: int, key_env: tuple[str, ...] = ()):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key_env = key_env
        runs.or_fail(api_keys.check_key, self.url, key_env, "the server")
        key = api_keys.key_for(self.url, key_env)
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.transfer = None
        try:
            served = self._call("GET", "v1/models").json()["data"][0]
            self.n_workers = self._call("GET", "get_world_size").json()["world_size"]
        except requests.ConnectionError as error:
            runs.fail(f"--vllm-server-url {url}: no server answers ({type(error).__name__})")
        except PermissionError as error:
            runs.fail(f"--vllm-server-url: {error}")
        except (RuntimeError, ValueError, LookupError) as error:
            runs.fail(f"--vllm-server-url: {error}; start `vllm serve` with VLLM_SERVER_DEV_MODE=1")
        if served["max_model_len"] < max_length:
            runs.fail(
                f"--vllm-server-url: the server takes {served['max_model_len']} tokens, and prompt and completion may "
                f"have {max_length}; start it with --max-model-len {max_length}"
            )
        try:  # `_connect` needs them, when all models are loaded
            from vllm.distributed.weight_transfer import (  # noqa: F401
                HTTPVLLMWeightSyncClient,
                WeightTransferTrainerFactory,
            )
        except ImportError as error:
            runs.fail(f"--vllm-server-url needs vLLM 0.31 in the run's environment as well: {error}")

    def _call(self, method: str, route: str, **options) -> requests.Response:
        """Calls a route; PermissionError for a wrong key, RuntimeError with the server's words otherwise."""
        response = requests.request(method, f"{self.url}/{route}", headers=self.headers, **options)
        if response.status_code == 401:
            raise PermissionError(f"{self.url} answers 401: {api_keys.advice(self.url, self.key_env)}")
        if not response.ok:
            told = api_keys.hide_keys(response.text, self.key_env)[:300]
            raise RuntimeError(f"{self.url}/{route} answers {response.status_code}: {told}")
        return response

    # --- completions

    def complete(self, bodies: dict[int, dict]) -> Iterator[tuple[int, list[int], list[float], bool]]:
        """Yields (place, token ids, log-probabilities, finished) as completions end.

        `bodies`: place -> body for /v1/completions, its prompt in token ids; without a seed it gets one
        from NumPy's generator. `finished` is False if the token limit cut the completion off.
        """
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            place_of = {}
            for place, body in bodies.items():
                if "seed" not in body:  # the server's generator knows nothing of the run's step
                    body = body | {"seed": np.random.randint(2**31)}
                place_of[pool.submit(self._complete, body)] = place
            for future in as_completed(place_of):
                yield place_of[future], *future.result()

    def _complete(self, body: dict) -> tuple[list[int], list[float], bool]:
        """Returns token ids, log-probabilities and finished of one completion, read as it is written."""
        ids = []
        logprobs = []
        ending = None
        with self._call("POST", "v1/completions", json=body | STREAM, stream=True) as response:
            for line in response.iter_lines():
                watchdog.beat()
                if not line.startswith(b"data: {"):  # an empty line, or [DONE]
                    continue
                part = json.loads(line.removeprefix(b"data: "))
                if "error" in part:
                    raise RuntimeError(f"{self.url} broke off a completion: {part['error']}")
                choice = part["choices"][0]
                ids += choice["token_ids"]
                logprobs += choice["logprobs"]["token_logprobs"]
                ending = choice["finish_reason"]
        if ending not in ("stop", "length"):
            raise RuntimeError(f"{self.url} broke off a completion (finish_reason {ending})")
        return ids, logprobs, ending == "stop"

    # --- weights

    def update(self, trained: torch.nn.Module) -> None:
        """Sends the weights of the policy being trained; all processes must call it. Untested on GPUs."""
        if self.transfer is None:
            self.transfer = self._connect(trained)
        is_main = PartialState().is_main_process
        if is_main:
            self._call("POST", "pause", params={"mode": "wait"})  # also empties the prefix cache
        self.transfer.send_weights()
        if is_main:
            self._call("POST", "resume")
        PartialState().wait_for_everyone()  # nobody samples before the server has all weights

    def _connect(self, trained: torch.nn.Module):
        """Opens the NCCL group of the main process and the server's workers."""
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        group = NCCLTrainerInitInfo(
            master_address=get_ip(),
            master_port=get_open_port(),
            world_size=1 + self.n_workers,
            rank=PartialState().process_index,
        )
        client = HTTPVLLMWeightSyncClient(self.url)
        return WeightTransferTrainerFactory.trainer_init(group, client=client, source=PolicyWeights(trained))

    def close(self) -> None:
        """Leaves the NCCL group; the server goes on."""
        if self.transfer:
            self.transfer.shutdown()


class PolicyWeights:
    """The whole weights of the policy as vLLM's weight transfer reads them; see its class WeightSource."""

    def __init__(self, trained: torch.nn.Module):
        from vllm.distributed.weight_transfer import ParamMeta

        self.trained = trained
        self.metas = []
        for name, weight in policy.whole_weights(trained):
            self.metas.append(ParamMeta(name, weight.dtype, tuple(weight.shape)))

    def metadata(self) -> list:
        return self.metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return policy.whole_weights(self.trained)
