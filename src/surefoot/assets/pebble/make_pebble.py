"""How `pebble`, the built-in policy, was made: run this file and get it again.

Owns       the folder it lies in: tokenizer, chat template, weights, manifest.
Promises   the same seed and thread count give the same bytes on the same machine and torch; no task
           that `is_heldout(id, HELDOUT)` names is ever trained on.
Never      downloads anything.

Two stages. First the model learns two-digit addition from right answers. Then a faulty
teacher, right in about a fifth of the cases, covers that knowledge: its favourite
mistake is systematic (it forgets a carry, or adds a ten that is not there), so the most
likely answer is wrong almost everywhere and the right one is merely possible. What is
left for reinforcement learning is real: choose what is right over what is usual.

    python make_pebble.py [--out FOLDER] [--seed 0] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from torch import Tensor

from surefoot.data.heldout import is_heldout
from surefoot.data.sources import SUMS_LIMIT, sums_tasks
from surefoot.records import Task
from surefoot.system.files import sha256_of

PAD, UNK, END = "<|pad|>", "<|unk|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, UNK, END, *(f"<|{role}|>" for role in ROLES))
CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation

TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception("pebble knows the roles system, user, assistant and tool, not '" ~ message['role'] ~ "'") -}}
{%- endif -%}
{%- if message['content'] is not string -%}
{{- raise_exception("pebble reads text only, and a " ~ message['role'] ~ " message has none") -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

HELDOUT = 0.2
"""Kept out of the warm start: twice the default `heldout_fraction`, so that a larger one is still clean."""

BATCH = 128
LEARN_STEPS, LEARN_RATE = 900, 2e-3
BLUR_STEPS, BLUR_RATE = 250, 3e-4
RIGHT, SYSTEMATIC = 0.20, 0.66
"""The faulty teacher's shares of right answers and of its favourite mistake; the rest is random."""

IGNORED = -100
"""Label of positions without loss."""

Teacher = Callable[[Task, random.Random], Any]
"""What it says to a task: text here, whole messages where a tool is called."""


class TeachingStage(NamedTuple):
    """Supervised steps after one teacher."""

    teacher: Teacher
    steps: int
    rate: float
    shares: dict[str, float]
    """How the teacher answers, for the manifest."""


class PolicyRecipe(NamedTuple):
    """All in which the built-in policies differ."""

    name: str
    source: str
    tasks: Callable[[int], Sequence[Task]]
    tokenizer: Callable[[], Any]
    loss_of: Callable[[Any, Any, Sequence[Task], Sequence[Any]], Tensor]
    measure: Callable[[Any, Any, Sequence[Task]], dict[str, Any]]
    batch: int
    learn: TeachingStage
    blur: TeachingStage


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per character; a character that is not known becomes <|unk|>, it never vanishes."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token=UNK, fuse_unk=False))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    outer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        model_max_length=512,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    outer.chat_template = TEMPLATE
    return outer


def make_model(tokenizer: Any) -> transformers.LlamaForCausalLM:
    """A small Llama with one embedding row per token of the tokenizer."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=end, pad_token_id=pad
    )
    return model


def right_answer(task: Task, _: random.Random) -> str:
    """The teacher of the first stage."""
    return str(task.columns["answer"])


def faulty_answer(task: Task, rng: random.Random) -> str:
    """The teacher of the second stage: right, systematically wrong, or random."""
    a, b = _numbers(task)
    draw = rng.random()
    if draw < RIGHT:
        return str(a + b)
    if draw < RIGHT + SYSTEMATIC:
        carries = a % 10 + b % 10 >= 10
        return str(a + b - 10 if carries else a + b + 10)
    return str(rng.randrange(2 * SUMS_LIMIT - 1))


def _numbers(task: Task) -> tuple[int, int]:
    a, b = task.id.removeprefix("sums/").split("+")
    return int(a), int(b)


def encode(tokenizer: Any, tasks: Sequence[Task], answers: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both (N, T), padded on the right; loss on the answer and its end only."""
    pairs = []
    for task, answer in zip(tasks, answers, strict=True):
        text = tokenizer.apply_chat_template(task.messages(), tokenize=False, add_generation_prompt=True)
        pairs.append((tokenizer(text)["input_ids"], tokenizer(answer + END)["input_ids"]))
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        stop = len(prompt) + len(answer)
        ids[row, :stop] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : stop] = torch.tensor(answer)
    return ids, labels


def loss_of(model: Any, tokenizer: Any, tasks: Sequence[Task], answers: Sequence[str]) -> Tensor:
    """() mean cross-entropy per labelled token."""
    ids, labels = encode(tokenizer, tasks, answers)
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED)


def train(
    model: Any, tokenizer: Any, tasks: Sequence[Task], recipe: PolicyRecipe, stage: TeachingStage, seed: int
) -> None:
    """Supervised steps with AdamW, short warm-up, cosine to zero."""
    rng = random.Random(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=stage.rate, weight_decay=0.01)
    model.train()
    for step in range(stage.steps):
        batch = rng.sample(tasks, recipe.batch)
        loss = recipe.loss_of(model, tokenizer, batch, [stage.teacher(task, rng) for task in batch])
        optimiser.param_groups[0]["lr"] = (
            stage.rate * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / stage.steps))
        )
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            print(f"{stage.teacher.__name__} step {step}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def measure(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> dict[str, float]:
    """Exact figures, no sampling: the probability of the right answer and its end, at temperature 1."""
    model.eval()
    ids, labels = encode(tokenizer, tasks, [str(task.columns["answer"]) for task in tasks])
    logits, wanted = model(input_ids=ids).logits[:, :-1].float(), labels[:, 1:]
    counted = wanted != IGNORED
    picked = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    p = picked.masked_fill(~counted, 0.0).sum(-1).double().exp()
    greedy = ((logits.argmax(-1) == wanted) | ~counted).all(-1)
    figures = {
        "sampled_accuracy": p.mean().item(),
        "pass_at_16": (1 - (1 - p) ** 16).mean().item(),
        "greedy_accuracy": greedy.double().mean().item(),
    }
    return {name: round(value, 4) for name, value in figures.items()}


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Weights in bfloat16, tokenizer and template, as `transformers` lays them out."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that both 4.x and 5.x load
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def write_manifest(recipe: PolicyRecipe, model: Any, args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """What lies in the folder and how it came about."""
    out = args.out
    names = sorted(p.name for p in out.iterdir() if p.suffix in {".json", ".jinja", ".safetensors"})
    contents = {name: (out / name).read_bytes() for name in names if name != "manifest.json"}
    learn, blur = recipe.learn, recipe.blur
    manifest = {
        "name": recipe.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "files": {n: {"bytes": len(c), "sha256": sha256_of(c)} for n, c in contents.items()},
        "made": {
            "by": f"make_{recipe.name}.py",
            "seed": args.seed,
            "threads": args.threads,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tasks": f"{recipe.source}, without the held-out share {HELDOUT}",
            "batch": recipe.batch,
            "learn": {"steps": learn.steps, "learning_rate": learn.rate, **learn.shares},
            "blur": {"steps": blur.steps, "learning_rate": blur.rate, **blur.shares},
        },
        "measured": figures,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def make(recipe: PolicyRecipe, folder: Path) -> None:
    """Make the whole folder, here or where the command line says."""
    parser = argparse.ArgumentParser(description=f"make the built-in policy {recipe.name} again")
    parser.add_argument("--out", type=Path, default=folder)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    tasks = recipe.tasks(args.seed)
    seen = [task for task in tasks if not is_heldout(task.id, HELDOUT)]
    unseen = [task for task in tasks if is_heldout(task.id, HELDOUT)]
    tokenizer = recipe.tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer, seen, recipe, recipe.learn, args.seed)
    figures = {"after_learning": recipe.measure(model, tokenizer, unseen)}
    print(figures, flush=True)
    train(model, tokenizer, seen, recipe, recipe.blur, args.seed + 1)
    args.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, args.out)
    figures["heldout"] = recipe.measure(model.float(), tokenizer, unseen)
    print(figures)
    write_manifest(recipe, model, args, figures)


PEBBLE = PolicyRecipe(
    name="pebble",
    source="builtin:sums",
    tasks=lambda seed: sums_tasks(SUMS_LIMIT * SUMS_LIMIT, seed),
    tokenizer=make_tokenizer,
    loss_of=loss_of,
    measure=measure,
    batch=BATCH,
    learn=TeachingStage(right_answer, LEARN_STEPS, LEARN_RATE, {}),
    blur=TeachingStage(faulty_answer, BLUR_STEPS, BLUR_RATE, {"right": RIGHT, "systematic": SYSTEMATIC}),
)

if __name__ == "__main__":
    make(PEBBLE, Path(__file__).parent)
