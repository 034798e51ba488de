"""Three GRPO or PPO steps whose sampling noise depends on the step and the completion's place in the global batch only, so that
one process and two sample the same completions. Started by tests/test_scripts.py: rl_worker.py grpo|ppo|dense PROMPTS OUT"""

import re
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from trl import GRPOConfig

from rewards import Scores, dense
import ppo
import rollout
from rows import read_rows
import train_ppo
import training
import utils


class KeyedGumbel(LogitsProcessor):
    """argmax(logits / T + Gumbel noise) is a sample from softmax(logits / T); the noise has its own seed a token."""

    def __init__(self, step: int, first_row: int, temperature: float):
        self.step, self.first_row, self.temperature, self.position = step, first_row, temperature, 0

    def __call__(self, input_ids, scores):
        noise = []
        for row in range(self.first_row, self.first_row + len(scores)):
            rng = torch.Generator().manual_seed((self.step * 1000 + row) * 1000 + self.position)
            noise.append(
                -torch.log(-torch.log(torch.rand(scores.size(1), generator=rng).clamp(1e-9, 1 - 1e-7)))
            )
        self.position += 1
        return scores / self.temperature + torch.stack(noise)


def right(rows: list[dict], group_size: int):
    """Right is a response with an even number of different words."""
    values = [float(len(set(row["response"].split())) % 2 == 0) for row in rows]
    return Scores(values, {"math": values}, {"math": values}, values, {})


def words(messages: list[dict], text: str) -> list[tuple[int, float]]:
    """A step judge: every third word ends a step, whose probability is the share of short words so far."""
    ends, found = [m.end() for m in re.finditer(r"\S+", text)], text.split()
    return [(ends[n], sum(len(w) < 5 for w in found[: n + 1]) / (n + 1)) for n in range(2, len(ends), 3)]


def main(algorithm: str, prompts: str, out: Path) -> None:
    state = PartialState(cpu=True)
    out.mkdir(exist_ok=True)
    tokenizer = utils.load_tokenizer("data/toy/base")
    utils.prepare_tokenizer(tokenizer, "plain")
    rows = [{"id": r["id"], "prompt": r["messages"]} for r in read_rows(prompts, "messages")]
    cls, config, own = rollout.RolloutTrainer, GRPOConfig, {"num_generations": 4}
    more = {}
    if algorithm == "ppo":
        cls, config, own = ppo.PPOTrainer, ppo.PPOConfig, {}
        more = {
            "critic": ppo.load_critic("data/toy/base", train_ppo.Args(gradient_checkpointing=False)),
            "critic_learning_rate": 1e-3,
            "gamma": 1.0,
            "lam": 0.95,
            "value_clip": 0.5,
        }
    if algorithm == "dense":
        implicit = dense.ImplicitReward(AutoModelForCausalLM.from_pretrained("data/toy/base"), 0.5, 1e-3)
        steps = dense.ProcessReward(f"{__file__}:words", "cpu", 1000)
        more = {"compose": right, "dense_rewards": [("process", 0.5, steps), ("prime", 1.0, implicit)]}
    trainer = cls(
        model=AutoModelForCausalLM.from_pretrained("data/toy/base"),
        args=config(
            output_dir=str(out),
            max_steps=3,
            **own,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4 // state.num_processes,
            steps_per_generation=4 // state.num_processes,
            max_completion_length=16,
            temperature=1.0,
            beta=0.04,
            use_bias_correction_kl=False,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[training.RunLogger(out, {"reward": "reward"}, "plain")],
        reward_model=utils.RewardModel("data/toy/reward_model", "response", "plain"),
        think_format="plain",
        on_bad_format="score",
        format_margin=1.0,
        run=out,
        allow_truncation=True,
        **more,
    )
    generate = trainer.model.generate

    def keyed(*args, input_ids=None, **kwargs):
        noise = KeyedGumbel(trainer.state.global_step, state.process_index * len(input_ids), 1.0)
        return generate(*args, input_ids=input_ids, logits_processor=LogitsProcessorList([noise]), **kwargs)

    trainer.model.generate = keyed
    trainer.generation_config.do_sample = trainer.generation_kwargs["do_sample"] = False
    trainer.train()
    training.finish(out, {})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
