"""Rollouts with tools: does one slow tool call hold anybody but its own rollout?

    python benchmarks/tool_rollouts.py [--quick] [--pairs 3]

64 rollouts (8 groups of 8) of the built-in `pebble_tools` on the product's own engine, collector and tool sessions,
each with four turns and a tool call between two of them. Every call takes 50 ms, but the first call of one rollout
takes 10 s. The figure is the wall time of all 64 over the time that the slowest rollout took by itself, alone on the
same engine: 1.0 would be perfect. What the model says is its own, token by token; what its turns are read as is always
a call, so that rollouts take all their turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from load import LoadProbe
from method import Journal
from report import Row, common_arguments, publish

from surefoot.data.sources import errands_tasks
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.serving import EngineLoop
from surefoot.learner.chat import ChatCodec
from surefoot.learner.model import Policy, load_policy
from surefoot.protocols import Grade, ToolAnswer, ToolSpec
from surefoot.records import Rollout, Task
from surefoot.runtime.requests import Sampling
from surefoot.runtime.rollout import RolloutCollector
from surefoot.tools.session import ToolEnvironment, ToolLimits

GROUPS, SIBLINGS, TURNS, TOKENS = 8, 8, 4, 64
QUICK_S, THREADS, GOAL = 0.05, 32, 1.1
SLOW = "train/1/0/0"
CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
NOTE = (
    f"{GROUPS * SIBLINGS} rollouts of {TURNS} turns of at most {TOKENS} tokens on pebble_tools; a tool call "
    f"takes {QUICK_S * 1000:g} ms, the first one of one rollout {{slow:g}} s; {THREADS} tool threads. Ratio: the wall "
    "time of all over that of the slow rollout alone on the same engine; median over the runs. Limit: 1.0."
)


@dataclass
class WaitingTools:
    """A toolkit whose tool waits; the first call of the slow rollout for long."""

    slow_s: float
    specs: Sequence[ToolSpec] = (ToolSpec("wait", "waits", {"type": "object"}),)

    def open(self, task: Task, rollout: str, seed: int) -> WaitingTool:
        """The tools of one rollout."""
        return WaitingTool(self.slow_s if rollout == SLOW else QUICK_S)

    @property
    def routes(self) -> Mapping[str, Sequence[str]]:
        """All tasks have all tools."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


class WaitingTool:
    """Its first call takes `first_s`."""

    opening = None

    def __init__(self, first_s: float) -> None:
        self._next_s = first_s

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """Wait, then answer."""
        threading.Event().wait(self._next_s)
        self._next_s = QUICK_S
        return ToolAnswer("done")

    def reward(self) -> float | None:
        """No opinion."""
        return None

    def close(self) -> None:
        """Nothing to let go of."""


class Equal:
    """Graders that take no time."""

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout], each: Any = None) -> list[Grade]:
        """The same for all."""
        return [Grade(None, {}, r.failure) if r.failure else Grade(1.0, {"equal": 1.0}) for r in rollouts]

    def explain_failures(self) -> str:
        """None fail."""
        return ""

    def close(self) -> None:
        """Nothing to end."""


def run(policy: Policy, engine: EngineLoop, slow_s: float, *, groups: int, siblings: int) -> float:
    """Wall seconds of so many rollouts, the slow one among them."""
    codec = ChatCodec(policy.tokenizer, policy.stop_ids, policy.spec.vocab, max_reply_tokens=16)
    codec.decode = lambda token_ids: CALL  # type: ignore[method-assign]
    tasks = errands_tasks(groups, 0)
    environment = ToolEnvironment(Equal(), WaitingTools(slow_s), ToolLimits(TURNS, stop_loops=False))
    collector = RolloutCollector(
        engine, environment, codec, {task.id: codec.encode_prompt(task.messages()) for task in tasks}, seed=0,
        token_count=codec.token_count, tools=environment, tool_threads=THREADS,
    )  # fmt: skip
    sampling = Sampling(siblings, 1.0, TOKENS, engine.engine.max_width)
    started = time.perf_counter()
    found = collector.run_rollouts(tasks, sampling, purpose="train", step=1)
    seconds = time.perf_counter() - started
    _check([rollout for each in found for rollout in each.group.rollouts])
    return seconds


def _check(rollouts: Sequence[Rollout]) -> None:
    """The work is what it is said to be: the slow rollout took all its turns, and nearly all others did."""
    whole = [rollout.ended == "max_turns" and len(rollout.turns) == TURNS for rollout in rollouts]
    if not whole[0] or sum(whole) < 0.9 * len(whole):
        raise SystemExit(f"{sum(whole)} of {len(whole)} rollouts took {TURNS} turns: not the work that is compared")


def main() -> int:
    """Measure and print."""
    parser = common_arguments(__doc__, pairs=3)
    parser.add_argument("--quick", action="store_true", help="does it run? a slow call of half a second, no verdict")
    args = parser.parse_args()
    slow_s, times = (0.5, 1) if args.quick else (10.0, args.pairs or 3)
    torch.set_num_threads(args.threads)
    journal = Journal("tool_rollouts", {"rollouts": GROUPS * SIBLINGS, "slow_s": slow_s, "times": times})
    policy = load_policy("pebble_tools", base=Path.cwd(), device="cpu", dtype="float32")
    engine = EngineLoop(EmbeddedEngine(policy.spec, rows=GROUPS * SIBLINGS, max_width=policy.spec.max_positions))
    engine.load_weights(dict(policy.model.named_parameters()), 0)
    run(policy, engine, 0.0, groups=GROUPS, siblings=SIBLINGS)  # packs the weights, fills the caches
    probe, found = LoadProbe(), []
    mark = probe.mark()
    for _ in range(times):
        alone = run(policy, engine, slow_s, groups=1, siblings=1)
        together = run(policy, engine, slow_s, groups=GROUPS, siblings=SIBLINGS)
        found.append((together / alone, together, alone))
        journal.write("run", {"together": together, "alone": alone, "ratio": together / alone})
    engine.close()
    load = probe.since(mark)
    ratio, together, alone = sorted(found)[len(found) // 2]
    spread = f"{min(found)[0]:.3f} to {max(found)[0]:.3f}, {times} runs, others used {load.share:.0%} of the CPUs"
    row = Row(
        "tool rollouts", f"{GROUPS * SIBLINGS} rollouts, one call of {slow_s:g} s", f"{together:.2f} s",
        f"{alone:.2f} s alone", f"{ratio:.3f} of it ({spread})", "-" if args.quick else f"<= {GOAL:g}",
        None if args.quick else ratio <= GOAL, "1.0", NOTE.format(slow=slow_s),
    )  # fmt: skip
    return publish([row], args.rows)


if __name__ == "__main__":
    raise SystemExit(main())
