"""What a forward and a backward give under the launch config, as JSON: started by tests/test_scripts.py."""

import json

import runs  # isort: skip
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

state, accelerator = runs.processes(), Accelerator(cpu=True)
model = AutoModelForCausalLM.from_pretrained("data/toy/base", dtype="float32")
runs.skip_prompt_logits()
add_fused_lm_head(model, outputs=("log_probs", "entropy"))
model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
ids = torch.randint(5, 200, (2, 20), generator=torch.Generator().manual_seed(state.process_index))
out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone(), fused_lm_head=True)
(-out.log_probs.mean()).backward()
if state.is_main_process:
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    gradient = next(model.parameters()).grad
    print(json.dumps({"forward": str(policy.param_dtype), "log_probs": str(out.log_probs.dtype),
                      "sums": str(policy.reduce_dtype), "sharded": type(gradient).__name__}), flush=True)  # fmt: skip
runs.leave()
