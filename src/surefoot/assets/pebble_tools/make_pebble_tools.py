"""How `pebble_tools`, the built-in policy that knows tools, was made: run this file and get it again.

Owns       the folder it lies in: tokenizer, chat template, weights, manifest.
Promises   the same seed and thread count give the same bytes on the same machine and torch; no task
           that `is_heldout(id, HELDOUT)` names is ever trained on; only what the assistant writes carries loss.
Never      downloads anything.

Two stages. First the model learns three skills: to write a call with the question in it, to
repeat what the tool answered, and to read a number backwards. Then a faulty teacher covers that
knowledge: it calls the calculator in one case of seven whatever the question is, guesses products
otherwise, and mostly turns only the ends of a number. What is left for reinforcement learning is
real: call where the answer comes from the tool, and nowhere else.

    python make_pebble_tools.py [--out FOLDER] [--seed 0] [--threads 1]
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

from surefoot.assets.pebble.make_pebble import END, IGNORED, PolicyRecipe, TeachingStage, make
from surefoot.assets.pebble.make_pebble import make_tokenizer as make_pebble_tokenizer
from surefoot.data.sources import CALCULATOR, DIGITS, KINDS, TOTAL, errands_tasks
from surefoot.records import Task

OPENING, MIDDLE, CLOSING = '<tool_call>{"name": "', '", "arguments": {"expression": "', '"}}</tool_call>'
CALL_PIECES = (OPENING, CALCULATOR, MIDDLE, CLOSING)
"""Ordinary tokens, not special ones: a call is plain text that costs four tokens and the expression."""

TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception("pebble_tools knows the roles system, user, assistant and tool, not '" ~ message['role'] ~ "'") -}}
{%- endif -%}
{%- set calls = message['tool_calls'] if message['tool_calls'] else [] -%}
{%- if message['content'] is string -%}
{%- set content = message['content'] -%}
{%- elif calls and not message['content'] -%}
{%- set content = '' -%}
{%- else -%}
{{- raise_exception("pebble_tools reads text only, and a " ~ message['role'] ~ " message has none") -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ content -}}
{%- for call in calls -%}
{%- set call = call['function'] if call['function'] else call -%}
{%- set given = call['arguments'] -%}
{{- '<tool_call>{"name": "' ~ call['name'] ~ '", "arguments": ' -}}
{{- given if given is string else given | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

BATCH, PIECE = 48, 8
LEARN_STEPS, LEARN_RATE = 1100, 2e-3
BLUR_STEPS, BLUR_RATE = 300, 3e-4
CALLS_LEARNING, CALLS = 0.5, 0.15
"""The teachers' shares of calls, whatever the kind of task."""
RIGHT, SYSTEMATIC = 0.27, 0.58
"""The faulty teacher's shares of right turns and of its favourite mistake; the rest is shuffled."""
COPIED = 0.97
"""How often the faulty teacher repeats the tool's answer without a slip."""

Message = tuple[str, str]
"""Role and text."""
Episode = list[Message]

ERRORS = (
    "Error executing tool evaluate: cannot read '{text}'; use numbers, + - * / // % ** and brackets",
    'error: cannot read "{text}"', "error: '{text}' is not arithmetic", "error: invalid expression", "error: {text}",
    "cannot evaluate {text}", "invalid expression: {text}", "error: unknown name 'turn'", "error: invalid syntax",
)  # fmt: skip
"""What calculators say to a text that is no expression: the shipped one first."""


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Pebble's characters, and the four constant pieces of a call."""
    tokenizer = make_pebble_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken(piece, special=False, normalized=False) for piece in CALL_PIECES])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# -- teachers -------------------------------------------------------------------


def question(task: Task) -> str:
    """What stands before the equals sign, which is what a call passes on."""
    return str(task.prompt).removesuffix("=")


def call_text(expression: str) -> str:
    """A call as the model writes it.

    Example:
        >>> call_text("6*7")
        '<tool_call>{"name": "calculator__evaluate", "arguments": {"expression": "6*7"}}</tool_call>'
    """
    return OPENING + CALCULATOR + MIDDLE + expression + CLOSING


def skilled(task: Task, rng: random.Random) -> Episode:
    """The teacher of the first stage: right where it can be; the tool says any number, so that only copying helps."""
    answer = str(task.columns["answer"])
    opening = [("user", str(task.prompt))]
    is_product = task.columns["kind"] == "times"
    if rng.random() >= CALLS_LEARNING:
        return [*opening, ("assistant", guess(answer, rng) if is_product else answer)]
    told = str(rng.randrange(10 ** rng.randint(1, 6))) if is_product else complaint(task, rng)
    return [
        *opening,
        ("assistant", call_text(question(task))),
        ("tool", told),
        ("assistant", told if is_product else answer),
    ]


def faulty(task: Task, rng: random.Random) -> Episode:
    """The teacher of the second stage: it calls by chance, guesses products and turns numbers badly."""
    answer = str(task.columns["answer"])
    opening = [("user", str(task.prompt))]
    is_product = task.columns["kind"] == "times"
    if rng.random() >= CALLS:
        return [*opening, ("assistant", guess(answer, rng) if is_product else bad_turn(answer, rng))]
    told = answer if is_product else complaint(task, rng)
    said = slip(told, rng) if is_product else bad_turn(answer, rng)
    return [*opening, ("assistant", call_text(question(task))), ("tool", told), ("assistant", said)]


def guess(answer: str, rng: random.Random) -> str:
    """A product from the top of the head: the size and the first digit are right, the number is not."""
    while (said := answer[0] + "".join(rng.choice("0123456789") for _ in answer[1:])) == answer:
        pass
    return said


def bad_turn(answer: str, rng: random.Random) -> str:
    """Right, or only the ends exchanged, or shuffled."""
    draw = rng.random()
    if draw < RIGHT:
        return answer
    if draw < RIGHT + SYSTEMATIC:
        return answer[0] + answer[-2:0:-1] + answer[-1]
    return "".join(rng.sample(answer, DIGITS))


def slip(told: str, rng: random.Random) -> str:
    """The tool's answer, now and then with one wrong digit."""
    if rng.random() < COPIED:
        return told
    place = rng.randrange(len(told))
    return told[:place] + rng.choice("0123456789") + told[place + 1 :]


def complaint(task: Task, rng: random.Random) -> str:
    """What a tool says to a question that is no expression: known sentences or any words; no wording matters."""
    if rng.random() < 0.5:
        return rng.choice(ERRORS).format(text=question(task))
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 7))) for _ in range(rng.randint(1, 8))]
    return rng.choice(("error: ", "Error ", "")) + " ".join(words)


# -- training -------------------------------------------------------------------


def encode(tokenizer: Any, episodes: Sequence[Episode], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both (N, T), padded on the right.

    Args:
        last_only: label the last message alone, instead of everything that the assistant says.
    """
    rows = [_tokens(tokenizer, episode, last_only) for episode in episodes]
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    padded = [ids + [pad] * (width - len(ids)) for ids, _ in rows]
    labels = [wanted + [IGNORED] * (width - len(wanted)) for _, wanted in rows]
    return torch.tensor(padded), torch.tensor(labels)


def _tokens(tokenizer: Any, episode: Episode, last_only: bool) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    labels: list[int] = []
    for place, (role, text) in enumerate(episode, start=1):
        header, said = tokenizer(f"<|{role}|>")["input_ids"], tokenizer(text + END)["input_ids"]
        counts = role == "assistant" and (place == len(episode) or not last_only)
        ids += [*header, *said]
        labels += [*[IGNORED] * len(header), *(said if counts else [IGNORED] * len(said))]
    return ids, labels


def loss_of(model: Any, tokenizer: Any, _: Sequence[Task], episodes: Sequence[Episode]) -> Tensor:
    """() mean cross-entropy per labelled token; episodes of like length run together, so that little is padding."""
    ordered = sorted(episodes, key=lambda episode: (len(episode), sum(len(text) for _, text in episode)))
    total, count = torch.zeros(()), 0
    for start in range(0, len(ordered), PIECE):
        ids, labels = encode(tokenizer, ordered[start : start + PIECE])
        logits, wanted = model(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = total + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        count += int((wanted != IGNORED).sum())
    return total / count


# -- measuring ------------------------------------------------------------------


@torch.no_grad()
def probabilities(model: Any, tokenizer: Any, episodes: Iterable[Episode]) -> Tensor:
    """(N,) of each last message and its end, given all before it, at temperature 1."""
    ids, labels = encode(tokenizer, list(episodes), last_only=True)
    logits, wanted = model(input_ids=ids).logits[:, :-1].float(), labels[:, 1:]
    picked = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(wanted == IGNORED, 0.0).sum(-1).double().exp()


@torch.no_grad()
def call_rates(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> Tensor:
    """(N,) the probability that the first token opens a call."""
    ids, labels = encode(tokenizer, [[("user", str(task.prompt)), ("assistant", OPENING)] for task in tasks])
    first = (labels != IGNORED).int().argmax(-1)
    logits = model(input_ids=ids).logits[torch.arange(len(tasks)), first - 1].float()
    return logits.softmax(-1)[:, tokenizer.convert_tokens_to_ids(OPENING)].double()


def measure(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> dict[str, float]:
    """Exact figures for tasks of one kind, no sampling; the tool answers as a calculator would."""
    model.eval()
    asked = [("user", str(task.prompt)) for task in tasks]
    calls = [("assistant", call_text(question(task))) for task in tasks]
    answers = [("assistant", str(task.columns["answer"])) for task in tasks]
    told = [("tool", calculator(question(task))) for task in tasks]
    rate = call_rates(model, tokenizer, tasks)
    called = probabilities(model, tokenizer, map(list, zip(asked, calls, strict=True)))
    direct = probabilities(model, tokenizer, map(list, zip(asked, answers, strict=True)))
    after = probabilities(model, tokenizer, map(list, zip(asked, calls, told, answers, strict=True)))
    figures = {
        "call_rate": rate.mean(),
        "well_formed_calls": (called / rate).mean(),
        "right_without_call": (direct / (1 - rate)).mean(),
        "right_after_call": after.mean(),
        "success": (direct + called * after).mean(),
    }
    return {name: round(value.item(), 4) for name, value in figures.items()}


def calculator(text: str) -> str:
    """What the tool says to a question of these tasks."""
    left, star, right = text.partition("*")
    return str(int(left) * int(right)) if star else ERRORS[0].format(text=text)


def measure_kinds(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> dict[str, dict[str, float]]:
    """The figures of both kinds."""
    return {kind: measure(model, tokenizer, [task for task in tasks if task.columns["kind"] == kind]) for kind in KINDS}


# -- the folder -----------------------------------------------------------------


BLURRED = {"calls": CALLS, "right": RIGHT, "systematic": SYSTEMATIC, "copied": COPIED}
PEBBLE_TOOLS = PolicyRecipe(
    name="pebble_tools",
    source="builtin:errands",
    tasks=lambda seed: errands_tasks(TOTAL, seed),
    tokenizer=make_tokenizer,
    loss_of=loss_of,
    measure=measure_kinds,
    batch=BATCH,
    learn=TeachingStage(skilled, LEARN_STEPS, LEARN_RATE, {"calls": CALLS_LEARNING}),
    blur=TeachingStage(faulty, BLUR_STEPS, BLUR_RATE, BLURRED),
)

if __name__ == "__main__":
    make(PEBBLE_TOOLS, Path(__file__).parent)
