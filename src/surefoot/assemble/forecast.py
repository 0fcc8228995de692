"""How long a run will take: its parts added up, each at the pace that was measured on this machine.

Owns       what a run consists of: start, preflight, evaluations, steps, saves.
Promises   every part is counted, fixed ones too; every assumption is in the words that go with the number.
Never      says "at most": completions may be shorter, a machine may get busier.

What is assumed: completions of full length; rewards that differ in every group; with tools, half of the rollouts go on
after each turn. What a step costs beside the model (grading with a quick reward, journal, log) was measured once on two
cores (`OWN_*`: what the built-in run's step time leaves beside its parts, `benchmarks/forecast.py --parts`), and is
scaled by how fast plain Python is here and now. The other constants are rounded from the same runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.assemble.pace import Pace
from surefoot.config import Config
from surefoot.eval_cadence import Answered, cadence_of
from surefoot.tracking.text import counted, duration

REFERENCE_S = 0.0055
"""`pace.interpreter_seconds` on the machine where the numbers below were measured."""
START_S = 6.0
"""From typing the command to the first token, without the model: Python, torch, reward workers."""
LOAD_S, GGUF_LOAD_S = 5e-9, 1.5e-7
"""Per parameter: weights read, hashed and checked; and where a GGUF file is dequantised first."""
OWN_STEP_S, OWN_ROLLOUT_S = 0.003, 4e-5
"""Of a step, and of each of its rollouts: drawing, grading, journal, log."""
SAVE_BYTES_PER_S = 5e8
PROBE_TOKENS, PROBE_PROMPTS, PROBE_LENGTH = 8, 3, 97
"""What is asked of the engine after every weight update (`runtime.probes`)."""
GO_ON = 0.5
"""Share of the rollouts that call a tool, and so speak again, in each turn."""
CALL_S, SERVER_S = 0.002, 0.5
"""One tool call and one start of an isolated server, where neither was measured."""


@dataclass(frozen=True)
class Tools:
    """What tools add."""

    isolated: bool
    """Every rollout that calls starts a server of its own."""
    call_s: float | None = None
    server_s: float | None = None
    """Measured, or None."""


@dataclass(frozen=True)
class Forecast:
    """Seconds by part."""

    start: float
    preflight: float
    evaluation: float
    """One of them."""
    evaluations: int
    sampling: float
    learning: float
    keeping: float
    """Of one step, as the two above."""
    steps: int
    saving: float
    """All of it."""

    @property
    def step(self) -> float:
        """One step."""
        return self.sampling + self.learning + self.keeping

    @property
    def total(self) -> float:
        """The whole run."""
        return self.start + self.preflight + self.evaluation * self.evaluations + self.step * self.steps + self.saving


def forecast(
    config: Config, pace: Pace, *, parameters: int, prompt_tokens: int, asked: Answered, interpreter_s: float,
    tools: Tools | None = None, gguf: bool = False,
) -> Forecast:  # fmt: skip
    """A run of this config at this pace.

    Args:
        asked: tasks of one evaluation.
        interpreter_s: what `pace.interpreter_seconds` found.
    """
    slow = max(0.2, interpreter_s / REFERENCE_S)
    turns = _turns(config, tools)
    longer = 1.0 + sum(turns[1:]) * (config.max_completion_length + _reply(config, tools)) / max(
        1, prompt_tokens + config.max_completion_length
    )
    proof = PROBE_TOKENS * pace.decode + PROBE_PROMPTS * pace.prefill * max(1.0, PROBE_LENGTH / max(1, prompt_tokens))
    rollouts = config.rollouts_per_step
    play = _play(config, pace, rollouts, config.tasks_per_step, prompt_tokens, turns, tools, slow)
    passes = max(1, config.num_iterations)
    cadence = cadence_of(config, asked)
    answers = sum(asked) * config.num_generations_eval
    evaluation = _play(config, pace, answers, sum(asked), prompt_tokens, turns, tools, slow)
    looked = config.preflight_tasks * config.num_generations
    return Forecast(
        start=START_S * slow + parameters * (GGUF_LOAD_S if gguf else LOAD_S) * slow + pace.pack + proof,
        preflight=_play(config, pace, looked, config.preflight_tasks, prompt_tokens, turns, tools, slow),
        evaluation=evaluation + answers * OWN_ROLLOUT_S * slow,
        evaluations=cadence.count,
        sampling=(play + pace.pack + proof / config.weight_sync_steps) / passes,
        learning=pace.learn_fixed + rollouts * pace.learn_sample * longer,
        keeping=(OWN_STEP_S + rollouts * OWN_ROLLOUT_S) * slow,
        steps=config.max_steps,
        saving=_saves(config, cadence.count) * 12 * parameters / SAVE_BYTES_PER_S,
    )


def _turns(config: Config, tools: Tools | None) -> list[float]:
    """Share of the rollouts that speak in each turn."""
    return [GO_ON**turn for turn in range(config.max_turns if tools else 1)]


def _reply(config: Config, tools: Tools | None) -> float:
    """Tokens of a tool's answer: a quarter of what it may have."""
    return config.tools.max_result_tokens / 4 if tools else 0.0


def _play(
    config: Config, pace: Pace, rollouts: int, prompts: int, prompt_tokens: int, turns: list[float],
    tools: Tools | None, slow: float,
) -> float:  # fmt: skip
    """Seconds until these rollouts have said everything."""
    seconds, length = 0.0, float(max(1, prompt_tokens))
    for turn, share in enumerate(turns):
        speaking = math.ceil(rollouts * share)
        read = prompts if turn == 0 else speaking  # later every rollout has a history of its own
        seconds += read * pace.prefill * length / max(1, prompt_tokens)
        seconds += math.ceil(speaking / pace.rows) * config.max_completion_length * pace.decode
        length += config.max_completion_length + _reply(config, tools)
        if tools and turn < len(turns) - 1:
            seconds += _calls(config, math.ceil(speaking * GO_ON), tools, slow, first=turn == 0)
    return seconds


def _calls(config: Config, calls: int, tools: Tools, slow: float, *, first: bool) -> float:
    """Seconds that so many calls at once take; isolated servers are started by the first of a rollout."""
    wait = (tools.call_s or 0.0) * math.ceil(calls / config.tools.concurrency) + calls * CALL_S * slow
    if tools.isolated and first:
        wait += calls * (SERVER_S * slow if tools.server_s is None else tools.server_s) / max(1, config.threads)
    return wait


def _saves(config: Config, evaluations: int) -> int:
    """The end, what save_steps asks for, and half of the evaluations as new best ones."""
    regular = (config.max_steps - 1) // config.save_steps if config.save_steps else 0
    best = max(0, evaluations - 2) // 2 if config.save_best and config.holds_out else 0
    return 1 + regular + best


def lines(found: Forecast, where: str, notes: list[str]) -> list[str]:
    """The forecast in words, every assumption with it."""
    per_step = f"{_short(found.sampling)} sampling, {_short(found.learning)} learning, {_short(found.keeping)} keeping"
    parts = [f"start {duration(found.start)}"]
    if found.preflight:
        parts.append(f"preflight {duration(found.preflight)}")
    parts += [
        f"{counted(found.evaluations, 'evaluation')} of {_short(found.evaluation)}",
        f"{counted(found.steps, 'step')} of {_short(found.step)} ({per_step})", f"saving {duration(found.saving)}",
    ]  # fmt: skip
    return [
        f"time      about {duration(found.total)}: {'; '.join(parts)}",
        f"          measured now on {where}, with made-up weights of this shape",
        "          assumed: completions of full length, and that every group teaches (equal rewards cost no learning)",
        *(f"          {note}" for note in notes),
    ]


def _short(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"
