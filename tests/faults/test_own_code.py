"""A user's own loss, estimator, guard rule, engine and environment, through the real command: the good ones are used, and
each planted bad one is refused before step 1, with exit 4, file and line, and without a run folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import Ran, surefoot

TINY = [
    "max_steps=1", "tasks_per_step=2", "num_tasks=40", "heldout_fraction=0", "eval_steps=0", "preflight_tasks=0",
    "eval_on_start=false", "target_metric=none", "target_value=none", "max_completion_length=4", "save_rollouts=false",
    "probe_reward_tasks=0", "tools.in_prompt=false", "max_turns=2",
]  # fmt: skip
UNGUARDED = [*TINY, "guard.mode=off"]
GUARDED = [*(word for word in TINY if not word.startswith("heldout")), "eval_tasks=4"]

LOSS = """\
import torch
from surefoot.maths.losses import LossKind

def good(inputs):
    return -(inputs.ratio - 1).tanh() * inputs.advantages

def counted(inputs):
    return {"pull": (inputs.ratio * inputs.mask).sum()}

KIND = LossKind(objective=good, sums=counted)

def of_the_batch(inputs):
    return good(inputs) / inputs.mask.sum()

def of_the_width(inputs):
    return good(inputs) / inputs.logp.shape[1]

def summed(inputs):
    return good(inputs).sum()

def finer(inputs):
    return good(inputs).double()

def nan(inputs):
    return good(inputs) * (inputs.advantages * float("inf"))

def two(logp, old_logp):
    return logp

def fails(inputs):
    unknown = inputs.mask
    return unknown.nothing

def average(inputs):
    return {"pull": (inputs.ratio * inputs.mask).sum() / inputs.mask.sum().clamp(min=1)}

MEAN = LossKind(objective=good, sums=average)
NUMBER = 3
"""
ESTIMATOR = """\
def good(rewards, batch_std):
    return (rewards - rewards.mean()) / 2

def off_centre(rewards, batch_std):
    return rewards + 1

def one_for_all(rewards, batch_std):
    return rewards.mean()

def alone(rewards):
    return rewards
"""
RULE = """\
def good(curves):
    return "it has seen enough" if curves.heldout.count > 2 else None

def says_yes(curves):
    return True

def fails(curves):
    return 1 / 0
"""
ENGINE = """\
from dataclasses import replace
from concurrent.futures import Future

from surefoot.engines.embedded import EmbeddedEngine

class Good(EmbeddedEngine):
    def __init__(self, inputs):
        super().__init__(inputs.decoder, rows=inputs.rows, max_width=inputs.max_width)

class Short(Good):
    def generate(self, requests):
        return [replace(said, logprobs=said.logprobs[:-1]) for said in super().generate(requests)]

class Few(Good):
    def generate(self, requests):
        return super().generate(requests)[1:]

class Deaf(Good):
    def load_weights(self, weights, version):
        super().load_weights({name: tensor * 1.1 for name, tensor in weights.items()}, version)

class Empty:
    def __init__(self, inputs):
        self.version = 0

class Alone:
    def __init__(self):
        self.version = 0
"""
ENVIRONMENT = '''\
class Good:
    def reset(self, **row):
        self.pressed = 0
        return " Press."

    def press(self) -> int:
        """Press the button."""
        self.pressed += 1
        return self.pressed

    def get_reward(self) -> float:
        return 0.5

class Numbered(Good):
    def reset(self, **row):
        return 7

class Wordy(Good):
    def get_reward(self):
        return "high"

class Silent(Good):
    def pull(self, rope):
        return 1

class Endless:
    def press(self) -> int:
        """Press."""
        return 1
'''
FILES = {"l.py": LOSS, "a.py": ESTIMATOR, "g.py": RULE, "e.py": ENGINE, "v.py": ENVIRONMENT}


def words_of(key: str, name: str) -> list[str]:
    """The command that uses it."""
    if key == "guard.rules":
        return [*GUARDED, f'guard.rules=["decline","g.py:{name}"]']
    file = {"loss_type": "l.py", "scale_rewards": "a.py", "engine.kind": "e.py", "tools.environment": "v.py"}[key]
    return [*UNGUARDED, f"{key}={file}:{name}"]


def train(folder: Path, *words: str, planted: str | None = None) -> Ran:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    last = {word.partition("=")[0]: word for word in words}  # a key that is given again replaces the first
    return surefoot("train", *last.values(), cwd=folder, planted=planted)


def refused(ran: Ran, place: str, what: str) -> None:
    assert ran.code == 4, ran.out[-2000:] + ran.err[-2000:]
    assert f"{place}" in ran.err, ran.err
    assert what in ran.err, ran.err
    assert "why:" in ran.err
    assert "fix:" in ran.err
    assert not ran.run.exists(), "nothing is left behind"


BAD = [
    ("loss_type", "of_the_batch", "l.py:12, of_the_batch", "depends on its cut into microbatches"),
    ("loss_type", "of_the_width", "l.py:15, of_the_width", "depends on padding"),
    ("loss_type", "summed", "l.py:18, summed", "gave the shape ()"),
    ("loss_type", "finer", "l.py:21, finer", "gave torch.float64"),
    ("loss_type", "nan", "l.py:24, nan", "is not finite"),
    ("loss_type", "two", "l.py:27, two", "cannot be called with (inputs)"),
    ("loss_type", "fails", "l.py:32, fails", "AttributeError"),
    ("loss_type", "MEAN", "l.py:4, MEAN", "the sum pull of a step depends on its cut"),
    ("loss_type", "NUMBER", "l.py:1, NUMBER", "a int"),
    ("loss_type", "nowhere", "l.py has no function 'nowhere'", "did you mean"),
    ("scale_rewards", "off_centre", "a.py:4, off_centre", "do not add up to 0"),
    ("scale_rewards", "one_for_all", "a.py:7, one_for_all", "for 2 rewards"),
    ("scale_rewards", "alone", "a.py:10, alone", "cannot be called with (rewards, batch_std)"),
    ("guard.rules", "says_yes", "g.py:4, says_yes", "it gave True"),
    ("guard.rules", "fails", "g.py:8, fails", "ZeroDivisionError"),
    ("engine.kind", "Few", "e.py:14, Few", "answers for"),
    ("engine.kind", "Empty", "e.py:22, Empty", "without generate, load_weights, close"),
    ("engine.kind", "Alone", "e.py:26, Alone", "cannot be called with (inputs)"),
    ("tools.environment", "Numbered", "v.py:14, Numbered", "reset returned a int"),
    ("tools.environment", "Wordy", "v.py:18, Wordy", "get_reward returned 'high'"),
    ("tools.environment", "Silent", "v.py:22, Silent", "pull has no docstring"),
    ("tools.environment", "Endless", "v.py:26, Endless", "no method reset"),
]  # fmt: skip


@pytest.mark.turns(4)
@pytest.mark.parametrize(("key", "name", "place", "what"), BAD, ids=lambda value: str(value)[:20])
def test_a_bad_one_is_refused_before_step_1_with_file_and_line(
    tmp_path: Path, key: str, name: str, place: str, what: str
) -> None:
    words = words_of(key, name)
    words += ["preflight_tasks=2"] if key == "engine.kind" else []
    refused(train(tmp_path, *words), place, what)


@pytest.mark.parametrize(
    ("key", "text", "place"),
    [
        ("loss_type", "def good(inputs:\n    return 1\n", "(line 1)"),
        ("scale_rewards", "import nothing_of_that_name\n", "(line 1)"),
        ("engine.kind", "x = 1\nraise OSError('no')\n", "(line 2)"),
    ],
)
def test_a_file_that_does_not_load_is_refused_with_its_line(tmp_path: Path, key: str, text: str, place: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    refused(train(tmp_path, *UNGUARDED, f"{key}=broken.py:good"), f"{tmp_path}/broken.py cannot be loaded", place)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(train(tmp_path, *UNGUARDED, "loss_type=lost.py:good"), f"{tmp_path}/lost.py", "cannot be read")


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("key", "name", "plant"),
    [
        ("loss_type", "of_the_batch", "trust_own_losses"),
        ("scale_rewards", "off_centre", "trust_own_estimators"),
        ("guard.rules", "fails", "trust_own_rules"),
        ("engine.kind", "Few", "trust_own_engines"),
        ("tools.environment", "Wordy", "trust_own_environments"),
    ],
)
def test_a_check_that_is_not_called_is_seen(tmp_path: Path, key: str, name: str, plant: str) -> None:
    """The wire cut: the same bad code is no longer refused before step 1, with its place and no folder."""
    _, _, place, what = next(row for row in BAD if row[:2] == (key, name))
    with pytest.raises(AssertionError):
        refused(train(tmp_path, *words_of(key, name), planted=plant), place, what)


def test_an_engine_that_serves_other_weights_is_found_by_the_probes(tmp_path: Path) -> None:
    ran = train(tmp_path, *words_of("engine.kind", "Deaf"), "preflight_tasks=2")
    assert ran.code == 78, ran.err
    assert "does not serve version 0" in ran.err
    assert not ran.run.exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One run with a loss, an estimator, an engine and an environment of the user's own."""
    words = [*UNGUARDED, "loss_type=l.py:KIND", "scale_rewards=a.py:good", "engine.kind=e.py:Good"]
    ran = train(tmp_path_factory.mktemp("whole"), *words, "max_steps=2", "save_steps=1")
    assert ran.code in (0, 1), ran.err
    return ran


def test_good_ones_are_used(whole: Ran) -> None:
    steps = [row for row in whole.metrics if "learning_rate" in row]
    assert len(steps) == 2
    moving = [row for row in steps if row.get("grad_norm", 0) > 0]
    assert moving, "something was learned from"
    assert all("loss/pull" in row and 0.5 < row["loss/pull"] < 1.5 for row in moving)
    assert "l.py:KIND: of your own" in whole.out
    assert "clip_ratio/region_mean" not in moving[0], "nothing is clipped in a loss that clips nothing"


def test_their_digests_are_kept_with_the_run(whole: Ran) -> None:
    record = json.loads((whole.run / "environment.json").read_text())
    assert {name for name in record if ".py:" in name} == {
        "loss_type l.py:KIND", "scale_rewards a.py:good", "engine.kind e.py:Good",
    }  # fmt: skip


@pytest.mark.parametrize("plant", [None, "forget_own_digests"])
def test_a_resume_with_a_changed_file_is_refused(whole: Ran, tmp_path: Path, plant: str | None) -> None:
    """With the comparison cut, it goes on with another loss."""
    source = whole.run.parent / "l.py"
    shutil.copytree(whole.run, tmp_path / "run")
    kept = source.read_text()
    source.write_text(kept.replace("tanh()", "mul(2).tanh()"))
    try:
        again = surefoot("train", "--resume", "run", "max_steps=3", cwd=tmp_path, planted=plant, run="")
    finally:
        source.write_text(kept)
    if plant is None:
        assert again.code == 3, again.out + again.err
        assert "loss_type l.py:KIND changed since the run began" in again.err
    else:
        assert again.code in (0, 1), again.err


@pytest.mark.parametrize("key", ["loss_type", "scale_rewards", "engine.kind"])
def test_code_inside_a_run_folder_is_refused(whole: Ran, tmp_path: Path, key: str) -> None:
    """Somebody else's folder: its config names a file that came with it."""
    shutil.copytree(whole.run, tmp_path / "run")
    for name, text in FILES.items():
        (tmp_path / "run" / name).write_text(text)
    config, home = tmp_path / "run" / "config.toml", whole.run.parent
    file = {"loss_type": "l.py", "scale_rewards": "a.py", "engine.kind": "e.py"}[key]
    config.write_text(config.read_text().replace(f"{home}/{file}", f"{tmp_path}/run/{file}"))
    shutil.rmtree(tmp_path / "run" / "journal")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "verdict.json").unlink()
    again = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert again.code == 5, again.out + again.err
    assert f"{key} = " in again.err
    assert "names code in the run folder itself" in again.err


def test_a_rule_of_your_own_stops_a_run(tmp_path: Path) -> None:
    words = [word for word in GUARDED if not word.startswith(("max_steps", "eval_steps", "eval_on_start"))]
    ran = train(
        tmp_path, *words, "max_steps=4", "eval_steps=1", "guard.min_evals=2", 'guard.rules=["decline","g.py:good"]'
    )
    assert ran.code == 79, ran.out + ran.err
    assert "it has seen enough" in ran.err
    assert "of your own: g.py:good" in ran.out


def test_rules_of_your_own_stand_beside_ours(tmp_path: Path) -> None:
    ran = train(tmp_path, *GUARDED, 'guard.rules=["g.py:good"]')
    assert ran.code == 2
    assert 'add one of ours, such as "decline"' in ran.err
