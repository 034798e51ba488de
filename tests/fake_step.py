"""Prints the GiB per GPU of an optimizer step of Llama-3.1-8B on eight of them, by tensors without values.

python tests/fake_step.py FOLDER        # of the model's config; prints weights, the peaks of forward and backward, what stays
"""

import sys
import weakref

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import load_config
from rlmt.learner import LOGITS_AT_ONCE, Policy
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode

N_TOKENS = 8192  # of a micro-batch, in two rows


class Memory(TorchDispatchMode):
    """Knows all tensors that are made, and the most bytes that they had at once."""

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):  # says the size of the whole
            return
        storage = tensor.untyped_storage()
        found = (weakref.ref(storage), storage.nbytes())
        is_view = self.storages.get(storage._cdata) == found
        self.storages[storage._cdata] = found
        if tensor.numel() > 2**21 and not is_view:  # to add all up takes its time
            self.peak = max(self.peak, self.held())

    def held(self) -> int:
        self.storages = {key: found for key, found in self.storages.items() if found[0]() is not None}
        return sum(reference().nbytes() for reference, _ in self.storages.values())


def sum_of_logprobs(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """Does what Policy.forward does when all tokens are a completion's: its mask needs values."""
    hidden = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    weight = policy.model.get_output_embeddings().weight
    total = 0.0
    for start in range(0, N_TOKENS, LOGITS_AT_ONCE // len(weight)):
        chunk = slice(start, start + LOGITS_AT_ONCE // len(weight))
        inputs = (hidden[chunk], weight, None, ids.flatten()[chunk], False, "")
        logprobs, _ = checkpoint(policy._logprobs_of_chunk, *inputs, use_reentrant=False)
        total = total + logprobs.sum()
    return total


torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
mesh = init_device_mesh("cpu", (8,))
precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
Policy.forward = sum_of_logprobs
with FakeTensorMode():
    model = transformers.AutoModelForCausalLM.from_config(load_config(sys.argv[1]), dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model.train(), 1.0)
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(policy.parameters(), foreach=False)
    with Memory() as memory:
        for weight in policy.parameters():
            memory.add(weight.to_local())
        sizes = [memory.held()]
        loss = policy(torch.zeros(2, N_TOKENS // 2, dtype=torch.long))
        sizes.append(memory.peak)
        memory.peak = 0
        loss.backward()
        sizes.append(memory.peak)
        del loss
        optimizer.step()
        for moments in optimizer.state.values():
            memory.add(moments["exp_avg"].to_local())
            memory.add(moments["exp_avg_sq"].to_local())
        sizes.append(memory.held())
print(*(size / 2**30 for size in sizes))
