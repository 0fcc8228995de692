"""TRL's side of `end_to_end.py`: `GRPOTrainer.train()`, waiting for its turn between two steps."""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

from end_to_end import GENERATIONS, LEARNING_RATE, fingerprint, first_row, reward, side_arguments
from sides import Gate


def config_values(args: argparse.Namespace) -> dict[str, Any]:
    """Every number that also stands in `side_ours.py`, and what TRL's guide says to set for speed."""
    cell, cuda = args.cell, args.device == "cuda"
    rows = args.micro or cell.rollouts
    return {
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": cell.rollouts // rows,
        "num_generations": GENERATIONS,
        "max_completion_length": cell.tokens, "generation_kwargs": {"min_new_tokens": cell.tokens},
        "temperature": 1.0, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "loss_type": "dapo", "beta": 0.0, "scale_rewards": "group",
        "gradient_checkpointing": args.checkpointing, "bf16": cuda, "use_cpu": not cuda, "shuffle_dataset": False,
        "use_transformers_continuous_batching": args.continuous_batching, "logging_strategy": "no",
        "save_strategy": "no", "max_steps": 10_000, "report_to": [], "disable_tqdm": True,
        "seed": 0, "dataloader_pin_memory": False,
    }  # fmt: skip


def proof_of(output: dict[str, Any], rewards: list[float]) -> dict[str, Any]:
    """What one generation call produced: prompts without their padding, tokens sampled and trained on."""
    ids, mask = output["prompt_ids"], output["prompt_mask"].bool()
    prompts = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    owners = prompts[::GENERATIONS]
    groups = [rewards[i : i + GENERATIONS] for i in range(0, len(rewards), GENERATIONS)]
    trained = output["completion_mask"] * output["tool_mask"] if "tool_mask" in output else output["completion_mask"]
    return {
        "work": {
            "prompts": fingerprint(owners),
            "completions": len(prompts),
            "sampled_tokens": int(output["completion_mask"].sum()),
            "trained_tokens": int(trained.sum()),
            "groups_without_signal": sum(len(set(g)) == 1 for g in groups) / len(groups),
        },
        "prompt_tokens": sum(map(len, owners)),
    }


def make_trainer(args: argparse.Namespace, values: dict[str, Any], scratch: str, seen: dict[str, Any]) -> Any:
    """A GRPOTrainer whose generation step leaves its proof of work in `seen`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)

    def marks(completions: list[Any], **_: Any) -> list[float]:
        seen["rewards"] = reward(completions)
        return list(seen["rewards"])

    class Watched(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            seen["facts"] = proof_of(output, seen["rewards"])
            seen["facts"]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
            return output

    tokenizer, texts = (
        AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        json.loads(args.tasks.read_text()),
    )
    chat = tokenizer.chat_template is not None
    rows = [{"prompt": [{"role": "user", "content": text}] if chat else text} for text in texts]
    dtype = torch.bfloat16 if args.bf16_weights else torch.float32
    return Watched(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa"),
        processing_class=tokenizer,
        reward_funcs=marks, train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(output_dir=scratch, **values), peft_config=adapter(args.lora),
    )  # fmt: skip


def adapter(rank: int) -> Any:
    """As ours is by default: every linear layer, scaled by two; None trains all weights."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    """Build the trainer and let it train until the parent has seen enough."""
    args = side_arguments()
    gate = Gate()
    from transformers import TrainerCallback

    seen: dict[str, Any] = {}
    values = config_values(args)

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["row"] = first_row(kwargs["model"])
            control.should_training_stop = not gate.turn()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            facts, before = seen.pop("facts"), seen["row"]
            seen["row"] = first_row(kwargs["model"])
            facts["work"]["weights_moved"] = before != seen["row"]
            if not gate.turn(facts):
                control.should_training_stop = True

    with tempfile.TemporaryDirectory(prefix="surefoot-bench-trl-") as scratch:
        trainer = make_trainer(args, values, scratch, seen)
        trainer.add_callback(Turns())
        gate.ready(values | {"threads": args.threads})
        trainer.train()


if __name__ == "__main__":
    main()
