"""The real command with one bug planted in it: `python -m tests.runs.planted NAME train ...`.

Run it from the root of the repository. What follows NAME is what follows `surefoot` on a command line,
and the exit code is the command's own. The bugs:

    mask_shift_left             the loss mask stands one position too early: each row's last token is not trained
    mask_shift_right            one position too late: the first token is not trained, and padding is
    flip_advantages_after_checks  advantages change sign between the invariants and the loss
    shuffle_rewards             rewards are dealt out anew over all rollouts of a step, so no check can see it
    forget_the_guard            nobody tells the guard of an evaluation
    strange_sampler             one sibling of each group comes with sampler log-probabilities 40 nats too low
    longer_prompts              packing says that every prompt has one token more than it has
    short_batches               from the second batch on, each is one task short, and nobody complains
    forget_answers_of_a_set     the file of an evaluation's answers lacks those of its last set
    border_without_sets         what must never be trained on is the held-out share alone
    never_steps                 the optimiser never steps
    forget_changed_entries      ... and the verdict is not told how many parameter entries changed
    forget_equal_rewards        the verdict is not told that the rewards of every group were equal
    forget_the_probe            a run is started without asking its reward anything
    skip_publish                from the second version on, loading reports success and the engine keeps its weights
    torn_copy                   an engine that serves copies of the weights has one bit of one number wrong from the second on
    pool_holds_heldout          a held-out task is among the tasks that the run may train on
    plan_deals_heldout          the first task that the plan deals out is a held-out one
    pure_bfloat16               with dtype = "bfloat16" the optimiser steps the rounded weights themselves
    adapter_stays_home          an adapter is trained, and engines get the base without it
    adapter_steps_the_base      the optimiser of an adapter has the base as well
    no_peft                     no bug: a host without the package peft
    no_bitsandbytes             no bug: a host without the package bitsandbytes
    broken_bitsandbytes         no bug: a host where it is installed, and its import fails
    no_bfloat16                 no bug: a processor that says it multiplies in bfloat16 and dies of it
    engines_get_the_file        a base in four bits is trained beside, and engines get the file's weights with the adapter
    bytes_for_weights           the learner multiplies with the packed bytes of a base in four bits as if they were its weights
    swapped_nibbles             what comes back from four bits is one weight's neighbour
    rounded_start               the masters begin as the rounded weights instead of the model file's own
    learn_twice                 every step is applied to the weights twice
    own_rate                    something else than the schedule sets the optimiser's rate
    speak_in_circles            no bug: what begins with an odd digit is read as a text that goes round in circles
    forget_loops                ... and nobody looks for loops
    forget_datasets             nobody asks the data sets of a mixture one by one
    no_weights                  whoever wants to load weights is told so, loudly
    any_template_will_do        nobody asks whether the chat template shows the tools
    any_device_will_do          a device that is not there is taken for the processor
    any_name_will_do            tool names that no server lists are not noticed
    no_landlock                 no bug: the host's kernel has no Landlock
    trusting_git                git is asked as it comes, with the programs that a repository names
    no_sandbox                  no bug: a host that can build no sandbox
    trust_own_losses            a loss of the user's own is not held to the invariants
    trust_own_estimators        ... nor an advantage estimator
    trust_own_rules             ... nor is a guard rule tried out
    trust_own_engines           the answers of an engine of the user's own are not looked at
    trust_own_environments      an environment is not tried on the first task
    leaking_rows                rows of a batch reach each other in the learner, where an architecture is not plain
    leaking_rows_unproved       ... and the model is not asked about it before the run
    head_without_scaling        ... is scored by its bare output layer, and the model is not asked about it
    forget_own_digests          the files of a user's own code are not compared on resume
    clock_stands                the clock of `surefoot bench` shows one moment for ever
    clock_shows_nothing         ... or no number at all
    answers_from_nowhere        the engine answers in the right form, and nobody sampled it
    learner_rests               a step is reported as applied, and nothing was learned

A bug is planted after the reward workers are forked: planting needs torch, and forking comes before it. Those in EARLY
need none and are planted at once: what they break is over by then.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

Plant = Callable[[], None]


def mask_shift_left() -> None:
    """The mask of every batch, one position to the left."""
    _shift_mask(-1)


def mask_shift_right() -> None:
    """The mask of every batch, one position to the right."""
    _shift_mask(1)


def _shift_mask(by: int) -> None:
    from surefoot.learner import grpo
    from surefoot.maths import packing

    real = packing.make_batch

    def shifted(samples: Any, **keys: Any) -> Any:
        batch, stats = real(samples, **keys)
        if samples[0].item_id.startswith("probe/"):
            return batch, stats  # what proves a sync is scored, not trained
        mask = batch.mask.roll(by, dims=1)
        mask[:, 0 if by > 0 else -1] = False
        return replace(batch, mask=mask), stats

    packing.make_batch = grpo.make_batch = shifted  # type: ignore[attr-defined]


def flip_advantages_after_checks() -> None:
    """The loss gets minus the advantages that were checked."""
    from surefoot.learner import grpo

    real = grpo.policy_loss  # type: ignore[attr-defined]

    def flipped(logp: Any, old_logp: Any, advantages: Any, mask: Any, **keys: Any) -> Any:
        return real(logp, old_logp, -advantages, mask, **keys)

    grpo.policy_loss = flipped  # type: ignore[attr-defined]


def shuffle_rewards() -> None:
    """Training rewards are permuted over the whole step before anybody sees them; evaluation is left alone."""
    from surefoot.rewards.grading import SingleTurnEnvironment

    real = SingleTurnEnvironment.grade
    dice = random.Random(0)

    def grade(
        self: SingleTurnEnvironment, tasks: Sequence[Any], rollouts: Sequence[Any], each: Any = None
    ) -> list[Any]:
        grades = real(self, tasks, rollouts)
        if rollouts and rollouts[0].group.startswith("train/"):
            drawn = dice.sample(grades, len(grades))
            grades = [replace(d, correct=g.correct) for d, g in zip(drawn, grades, strict=True)]
        for group in sorted({rollout.group for rollout in rollouts}) if each else ():
            places = [place for place, rollout in enumerate(rollouts) if rollout.group == group]
            each(places, [grades[place] for place in places])
        return grades

    SingleTurnEnvironment.grade = grade  # type: ignore[method-assign]


def skip_publish() -> None:
    """Version 0 arrives, as a copy; every later version is only a number."""
    from surefoot.engines.embedded import EmbeddedEngine

    real = EmbeddedEngine.load_weights

    def load_weights(self: EmbeddedEngine, weights: Mapping[str, Any], version: int) -> None:
        if self._version is None:  # copied, since an engine reads the learner's tensors in place
            real(self, {name: tensor.detach().clone() for name, tensor in weights.items()}, version)
        self._version = version

    EmbeddedEngine.load_weights = load_weights  # type: ignore[method-assign]


def torn_copy() -> None:
    """Too little for any canary: only a sum over the tensor tells."""
    import torch

    from surefoot.engines.serving import EngineLoop

    real = EngineLoop._own
    served: list[int] = []

    def own(self: EngineLoop, weights: Any) -> Any:
        copies = real(self, weights)
        if self.copy_weights and served:
            next(iter(copies.values())).flatten().view(torch.int32)[0] ^= 1
        served.append(1)
        return copies

    EngineLoop._own = own  # type: ignore[method-assign]


def pure_bfloat16() -> None:
    """No masters, whatever the weights are kept in."""
    from surefoot.learner import grpo

    grpo.make_master_weights = lambda net, given=None: None  # type: ignore[attr-defined]


def rounded_start() -> None:
    """The masters that were loaded are not handed on."""
    from surefoot.learner import grpo

    real = grpo.make_master_weights  # type: ignore[attr-defined]
    grpo.make_master_weights = lambda net, given=None: real(net)  # type: ignore[attr-defined]


def learn_twice() -> None:
    """What a retry does that does not ask whether the first try was applied."""
    from surefoot.learner.grpo import GRPOLearner

    real = GRPOLearner.learn

    def twice(self: GRPOLearner, samples: Any, *, iteration: int = 0) -> Any:
        real(self, samples, iteration=iteration)
        return real(self, samples, iteration=iteration + 1)

    GRPOLearner.learn = twice  # type: ignore[method-assign]


def own_rate() -> None:
    """A scheduler of torch's own, beside ours."""
    from surefoot.learner import grpo

    real = grpo.make_optimizer  # type: ignore[attr-defined]

    def halve(optimiser: Any, args: Any, kwargs: Any) -> None:
        for group in optimiser.param_groups:
            group["lr"] /= 2

    def make(*args: Any, **keys: Any) -> Any:
        optimiser = real(*args, **keys)
        optimiser.register_step_pre_hook(halve)
        return optimiser

    grpo.make_optimizer = make  # type: ignore[attr-defined]


def speak_in_circles() -> None:
    """A model that loops, for a run whose own model is too small to; rewards see the loop as well."""
    from surefoot.learner.chat import ChatCodec

    real = ChatCodec.decode

    def decode(self: ChatCodec, token_ids: Sequence[int]) -> str:
        text = real(self, token_ids)
        return text + " Let me check that again." * 8 if text[:1] in tuple("13579") else text

    ChatCodec.decode = decode  # type: ignore[method-assign]


def forget_loops() -> None:
    """Loops are paid like answers."""
    from surefoot.rewards import grading

    speak_in_circles()
    grading.after_repetition = lambda grade, rollout, rules: grade  # type: ignore[attr-defined]


def forget_datasets() -> None:
    """The look at everything is the only look."""
    from surefoot.runtime import base as judging

    judging.check_datasets = lambda groups, datasets, allowed, play: []  # type: ignore[attr-defined]


def forget_the_guard() -> None:
    """The one call that tells it is gone."""
    from surefoot import evaluation

    evaluation.update_guard = lambda run: {}  # type: ignore[attr-defined]


def strange_sampler() -> None:
    """The importance weight of some rows is e to the power of hundreds."""
    from surefoot.learner.grpo import GRPOLearner

    real = GRPOLearner.learn

    def learn(self: GRPOLearner, samples: Sequence[Any], *, iteration: int = 0) -> Any:
        odd = [replace(s, logprobs=tuple(p - 40 for p in s.logprobs)) if s.index == 0 else s for s in samples]
        return real(self, odd, iteration=iteration)

    GRPOLearner.learn = learn  # type: ignore[method-assign]


def longer_prompts() -> None:
    """Every log-probability would be read one position too late."""
    from surefoot.learner import grpo
    from surefoot.maths import packing

    real = packing.make_batch

    def make_batch(samples: Any, **keys: Any) -> Any:
        batch, stats = real(samples, **keys)
        return replace(batch, prompt_lens=batch.prompt_lens + 1), stats

    grpo.make_batch = make_batch  # type: ignore[attr-defined]


def short_batches() -> None:
    """A step is taken on fewer tasks than it was planned with."""
    from surefoot.runtime.task_queue import DurableTaskQueue

    real = DurableTaskQueue.next_batch

    def next_batch(self: DurableTaskQueue, step: int, n: int) -> Any:
        return real(self, step, n if step == 1 else n - 1)

    DurableTaskQueue.next_batch = next_batch  # type: ignore[method-assign]


def pool_holds_heldout() -> None:
    """What is handed on as training tasks has a held-out task at its end; of a file on the disk, every row of it."""
    from surefoot.data.on_disk.dataset import StreamingDataset
    from surefoot.data.on_disk.index import AllRows
    from surefoot.run import build

    real = build.prepare

    def prepare(config: Any, base: Any, inputs: Any, *more: Any) -> Any:
        train = inputs.train
        if isinstance(train, StreamingDataset):
            leaking: Any = StreamingDataset._view(train.table, AllRows(train.table.index.rows))
        else:
            leaking = (*train, inputs.heldout[0])
        return real(config, base, replace(inputs, train=leaking), *more)

    build.prepare = prepare


def plan_deals_heldout() -> None:
    """A plan that knows a held-out task, deals it out first, and has told everybody what it is."""
    from surefoot.run import build
    from surefoot.runtime.sampler import AsyncSampler
    from surefoot.runtime.task_queue import DurableTaskQueue
    from surefoot.storage.ledger import Visit

    prepared, planned, made = build.prepare, DurableTaskQueue.plan_epoch, AsyncSampler.__init__
    known: list[Any] = []

    def prepare(config: Any, base: Any, inputs: Any, *more: Any) -> Any:
        known.append(inputs.heldout[0])
        return prepared(config, base, inputs, *more)

    def plan_epoch(self: DurableTaskQueue, needed: int, held: Sequence[str] = ()) -> None:
        self.tasks[known[0].id] = known[0]  # type: ignore[index]
        self.ledger.plan([Visit(known[0].id, 0)])
        planned(self, needed, held)

    def init(self: AsyncSampler, *args: Any, **keys: Any) -> None:
        made(self, *args, **keys)
        self._tasks[known[0].id] = (len(self._tasks), known[0])

    build.prepare, DurableTaskQueue.plan_epoch = prepare, plan_epoch  # type: ignore[method-assign]
    AsyncSampler.__init__ = init  # type: ignore[method-assign]


def forget_answers_of_a_set() -> None:
    """Everything is measured; what is kept of it has a hole."""
    from surefoot.run import store

    real = store.answer_rows
    store.answer_rows = lambda results: real(dict(list(results.items())[:-1]))  # type: ignore[assignment]


def border_without_sets() -> None:
    """The one place that lists what must never be trained on forgets the evaluation sets."""
    from surefoot.run import inputs

    inputs.heldout_all = lambda heldout, sets: tuple(heldout)  # type: ignore[attr-defined]


def forget_the_probe() -> None:
    """Nobody asks the reward anything before a run is started."""
    from surefoot.run import session

    session.probe_start = lambda config, inputs: []  # type: ignore[attr-defined]


EARLY = frozenset(
    {"border_without_sets", "evaluate_what_is_there", "forget_the_probe", "no_weights", "any_template_will_do",
     "any_device_will_do", "any_name_will_do", "no_landlock", "trusting_git", "no_sandbox", "forget_own_digests",
     "no_peft", "no_bitsandbytes", "broken_bitsandbytes", "no_bfloat16", "clock_stands", "clock_shows_nothing",
     "answers_from_nowhere", "learner_rests"}
)  # fmt: skip


def no_weights() -> None:
    """What comes before the weights is seen by who speaks first."""
    from surefoot.errors import ModelError
    from surefoot.learner import model

    class Nobody:
        from_config = model.AutoModelForCausalLM.from_config  # names and shapes alone

        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> Any:
            raise ModelError("weights were asked for", "planted", "planted")

    model.AutoModelForCausalLM = Nobody  # type: ignore[misc,assignment]


def any_template_will_do() -> None:
    """The template is not asked."""
    from surefoot.learner.chat import ChatCodec

    ChatCodec._check_marks = lambda self: None  # type: ignore[method-assign]


def any_device_will_do() -> None:
    """Every device is there."""
    from surefoot.learner import model

    model.resolve_device = lambda name: "cpu"  # type: ignore[assignment]


def any_name_will_do() -> None:
    """What the servers file names is not compared with what the server lists."""
    from surefoot.tools.mcp import pins

    pins._refuse_strangers = lambda server, names: None  # type: ignore[assignment]


def no_landlock() -> None:
    """A sandbox is built, and says that one wall is absent."""
    from surefoot.sandbox import host

    host._try = lambda: (0, None)  # type: ignore[assignment]


def trusting_git() -> None:
    """As a shell asks git."""
    from surefoot.system import git

    git.SETTINGS = git._NO_DRIVERS = ()
    git._OFFLINE = {}
    git._named = lambda entries: set()  # type: ignore[assignment]


def no_sandbox() -> None:
    """As in a container whose filter refuses new namespaces."""
    from surefoot.sandbox import host

    host.available = lambda: host.HostReport(False, ("user namespaces",))  # type: ignore[assignment]


def never_steps() -> None:
    """The optimiser is made, asked, and does nothing; what it changed is counted all the same."""
    from surefoot.learner.updates import CountedStep, StepUpdates

    def take(self: CountedStep) -> StepUpdates:
        return StepUpdates(entries=1, changed=0, published=0, due=0, taken=0)

    CountedStep.take = take  # type: ignore[method-assign]


def no_finite_gradient() -> None:
    """Every gradient holds a number that is none."""
    from surefoot.learner.grpo import GRPOLearner

    real = GRPOLearner._gradient

    def broken(self: GRPOLearner, *given: Any) -> dict[str, float]:
        return real(self, *given) | {"loss": float("nan")}

    GRPOLearner._gradient = broken  # type: ignore[method-assign]


def forget_changed_entries() -> None:
    """Whoever judges believes that entries changed."""
    never_steps()
    _forge_evidence(changed_entries=1)


def forget_equal_rewards() -> None:
    """Whoever judges believes that rewards differed."""
    _forge_evidence(differing=1)


def _forge_evidence(**facts: int) -> None:
    from surefoot.run import outcome

    real = outcome.evidence
    outcome.evidence = lambda run: replace(real(run), **facts)  # type: ignore[arg-type]


def evaluate_what_is_there() -> None:
    """Nobody asks whether an evaluation has what the run was given in Python."""
    from surefoot.run import evaluate

    evaluate.refuse_unanswerable = lambda *_, **__: None  # type: ignore[assignment]


def trust_own_losses() -> None:
    """Whatever a loss of the user's own computes, the run begins."""
    from surefoot.learner import own_code

    own_code.loss_breach = lambda settings: None  # type: ignore[attr-defined]


def trust_own_estimators() -> None:
    """Whatever an advantage estimator of the user's own computes, the run begins."""
    from surefoot.learner import own_code

    own_code.estimator_breach = lambda estimate: None  # type: ignore[attr-defined]


def trust_own_rules() -> None:
    """A guard rule is asked for the first time by the run's own evaluations."""
    from surefoot.guards import own_rules

    own_rules._try_out = lambda rule: None


def trust_own_engines() -> None:
    """Whatever an engine of the user's own answers goes on to the run."""
    from surefoot.engines.own import OneAtATime

    OneAtATime._looked_at = lambda self, requests, given, version: given  # type: ignore[assignment, method-assign]


def trust_own_environments() -> None:
    """The first rollout is the first to reset an environment."""
    from surefoot.tools.toolkits import ToolkitSpec

    ToolkitSpec.try_environment = lambda self, task: None  # type: ignore[method-assign]


def forget_own_digests() -> None:
    """Nobody asks what a user's own file was when the run began."""
    from surefoot.run import inputs

    inputs.own_digests = lambda config: {}  # type: ignore[attr-defined]


def adapter_stays_home() -> None:
    """Published are the weights that the adapter is beside, under each new version."""
    from surefoot.learner.lora import Adapter

    Adapter.published = lambda self, version: {name: self.base(name) for name in self._order}  # type: ignore[method-assign]


def adapter_steps_the_base() -> None:
    """Everything has a gradient, and the optimiser everything."""
    from surefoot.learner.lora import Adapter

    real = Adapter.__init__

    def init(self: Adapter, net: Any, *rest: Any, **more: Any) -> None:
        real(self, net, *rest, **more)
        for parameter in net.parameters():
            parameter.requires_grad_(True)
        self.trained = dict(net.named_parameters())

    Adapter.__init__ = init  # type: ignore[method-assign]


def no_peft() -> None:
    """Nobody finds it."""
    import importlib.util

    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "peft" else real(name, *rest)


def clock_stands() -> None:
    """Every measurement comes to 0."""
    from surefoot.run import bench

    bench.clock = lambda: 1.0


def clock_shows_nothing() -> None:
    """Every measurement comes to NaN."""
    from surefoot.run import bench

    bench.clock = lambda: float("nan")


def answers_from_nowhere() -> None:
    """All but the canary is answered at once, by nobody."""
    from surefoot.engines.serving import EngineLoop
    from surefoot.protocols import Completion

    real = EngineLoop.generate

    def generate(self: EngineLoop, requests: Sequence[Any]) -> list[Completion]:
        if any(request.urgent for request in requests):
            return real(self, requests)
        numbers = [request.max_new_tokens for request in requests]
        return [
            Completion(request.id, (5,) * n, (-1.0,) * n, "length", self.version, self.version)
            for request, n in zip(requests, numbers, strict=True)
        ]

    EngineLoop.generate = generate  # type: ignore[method-assign]


def learner_rests() -> None:
    """It says that it has learned."""
    from types import SimpleNamespace

    from surefoot.learner.grpo import GRPOLearner

    GRPOLearner.learn = lambda self, samples, iteration=0: SimpleNamespace(applied=True)  # type: ignore[assignment, method-assign]


def no_bitsandbytes() -> None:
    """Nobody finds it, and whoever imports it fails."""
    modules: dict[str, Any] = sys.modules
    modules["bitsandbytes"] = None


def broken_bitsandbytes() -> None:
    """Its library is of another machine."""
    from surefoot.learner import quantised

    def package() -> Any:
        raise OSError("libbitsandbytes_cpu.so: cannot open shared object file")

    quantised._package = package  # type: ignore[assignment]


def no_bfloat16() -> None:
    """As some virtual machines do."""
    import os
    import signal

    from surefoot.learner import precision

    precision._multiply = lambda: os.kill(os.getpid(), signal.SIGILL)  # type: ignore[assignment,return-value]


def engines_get_the_file() -> None:
    """What they get is moved by the difference between the file and what came back of it."""
    from surefoot.learner.lora import Adapter
    from surefoot.learner.quantised import QuantisedLinear

    given: dict[QuantisedLinear, Any] = {}
    made, published = QuantisedLinear.__init__, Adapter.published

    def init(self: QuantisedLinear, linear: Any, dtype: Any) -> None:
        made(self, linear, dtype)
        given[self] = linear.weight.detach().clone()

    def from_file(self: Adapter, version: int) -> Any:
        weights = dict(published(self, version))
        for name, layer in self._packed.items():
            value = weights[f"{name}.weight"]
            weights[f"{name}.weight"] = value + (given[layer].to(value.device) - layer.weight).to(value.dtype)
        return weights

    QuantisedLinear.__init__ = init  # type: ignore[method-assign]
    Adapter.published = from_file  # type: ignore[method-assign]


def bytes_for_weights() -> None:
    """Two levels to a byte, read as numbers between -1 and 1, and scaled as the weights are."""
    import torch

    from surefoot.learner.quantised import QuantisedLinear

    def forward(self: QuantisedLinear, input: Any) -> Any:
        levels = torch.stack([self.packed >> 4, self.packed & 15], 1).flatten()[: self.entries].float() / 7.5 - 1
        scales = self.scales.repeat_interleave(64)[: self.entries]
        return torch.nn.functional.linear(input, (levels * scales).view(self.out_features, self.in_features), self.bias)

    QuantisedLinear.forward = forward  # type: ignore[method-assign]


def swapped_nibbles() -> None:
    """The two halves of each byte come back in the wrong order."""
    from surefoot.learner import quantised

    real = quantised._unpack
    quantised._unpack = lambda packed, scales: real((packed >> 4) | (packed << 4), scales)


def leaking_rows() -> None:
    """A tenth of its neighbour in every row; one row alone has none."""
    from surefoot.learner import any_forward

    real = any_forward._states
    any_forward._states = lambda net, ids: (states := real(net, ids)) + 0.1 * (states.roll(1, dims=0) - states)


def leaking_rows_unproved() -> None:
    """The same, found by nobody before the first step."""
    from surefoot.learner import model

    leaking_rows()
    model.prove = lambda *_: None  # type: ignore[attr-defined]


def head_without_scaling() -> None:
    """Whatever the model does between its output layer and a probability is left out."""
    from surefoot.learner import any_forward, model

    any_forward._head_of = lambda net: net.get_output_embeddings()
    model.prove = lambda *_: None  # type: ignore[attr-defined]


PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        mask_shift_left, mask_shift_right, flip_advantages_after_checks, shuffle_rewards, skip_publish, torn_copy,
        forget_the_guard, strange_sampler, longer_prompts, short_batches, pool_holds_heldout, plan_deals_heldout,
        adapter_stays_home, adapter_steps_the_base, no_peft, no_bitsandbytes, broken_bitsandbytes, no_bfloat16, engines_get_the_file,
        bytes_for_weights, swapped_nibbles, pure_bfloat16, rounded_start, learn_twice, own_rate,
        forget_answers_of_a_set, border_without_sets,
        never_steps, no_finite_gradient, forget_changed_entries, forget_equal_rewards, evaluate_what_is_there, forget_the_probe,
        speak_in_circles, forget_loops, forget_datasets,
        no_weights, any_template_will_do, any_device_will_do, any_name_will_do, no_landlock, trusting_git, no_sandbox,
        trust_own_losses, trust_own_estimators, trust_own_rules, trust_own_engines, trust_own_environments,
        forget_own_digests, clock_stands, clock_shows_nothing, answers_from_nowhere, learner_rests,


        forget_own_digests, leaking_rows, leaking_rows_unproved, head_without_scaling,
    )
}  # fmt: skip


def plant_after_fork(plant: Plant) -> None:
    """Plant when the reward pool of the run has started, or at once."""
    if plant.__name__ in EARLY:
        plant()
        return
    from surefoot.rewards.pool import RewardPool

    real = RewardPool.start

    def start(self: RewardPool) -> RewardPool:
        started = real(self)
        if self._log_path is not None:  # the run's own, which log: the reward is probed in others before
            plant()
        return started

    RewardPool.start = start  # type: ignore[method-assign]


def main(words: Sequence[str]) -> None:
    """Plant the named bug, then hand the other words to the real command."""
    if not words or words[0] not in PLANTS:
        sys.exit(f"usage: python -m tests.runs.planted NAME train ...; NAME is one of {', '.join(PLANTS)}")
    plant_after_fork(PLANTS[words[0]])
    from surefoot.cli import main as command

    sys.argv = ["surefoot", *words[1:]]
    command()


if __name__ == "__main__":
    main(sys.argv[1:])
