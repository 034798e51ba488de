"""What a forward, a backward and a reading of the weights give under the launch config, as JSON: started by
tests/test_scripts.py."""

import json

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import DistributedBackend, VLLMGeneration
from trl.trainer.utils import add_fused_lm_head

import rollout
import training

state, accelerator = training.processes(), Accelerator(cpu=True)
model = AutoModelForCausalLM.from_pretrained("data/toy/base", dtype="float32")
whole = {name: weight.clone() for name, weight in model.named_parameters()}
training.skip_prompt_logits()
add_fused_lm_head(model, outputs=("log_probs", "entropy"))
model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
ids = torch.randint(5, 200, (2, 20), generator=torch.Generator().manual_seed(state.process_index))
forward = lambda: model(
    input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone(), fused_lm_head=True
)
out = forward()
(-out.log_probs.mean()).backward()
sharded = type(next(model.parameters()).grad).__name__
with torch.no_grad():
    forward()  # as the check of vLLM's logprobs: the last layers stay gathered
gathered = sum(not hasattr(weight, "full_tensor") for weight in model.parameters())
sync = object.__new__(VLLMGeneration)  # vLLM's side is not needed to read the weights
sync.model, sync.accelerator, sync._dist = model, accelerator, DistributedBackend(accelerator)
read = dict(rollout.merged_params(sync))
equal = all(torch.equal(read[name], weight) for name, weight in whole.items())
torch.manual_seed(0)
lora = get_peft_model(
    AutoModelForCausalLM.from_pretrained("data/toy/base", dtype="float32"),
    LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
)
layers = {name: layer for name, layer in lora.named_modules() if hasattr(layer, "get_delta_weight")}
merged = {
    f"{name.removeprefix('base_model.model.')}.weight": (
        layer.base_layer.weight + layer.get_delta_weight("default")
    ).detach()
    for name, layer in layers.items()
}
sync.model, _ = accelerator.prepare(lora, torch.optim.AdamW(p for p in lora.parameters() if p.requires_grad))
with_lora = dict(rollout.merged_params(sync))
adapted = with_lora.keys() == whole.keys() and all(
    torch.allclose(with_lora[n], w, atol=1e-6) for n, w in merged.items()
)
if state.is_main_process:
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    print(
        json.dumps(
            {
                "forward": str(policy.param_dtype),
                "log_probs": str(out.log_probs.dtype),
                "sums": str(policy.reduce_dtype),
                "gradient": sharded,
                "gathered": gathered > 0,
                "read": equal,
                "read with LoRA": adapted and len(merged) > 20,
            }
        ),
        flush=True,
    )
training.leave()
