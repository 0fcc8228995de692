"""Names from a config or a command line that try to lead elsewhere: nothing appears outside the place that was meant."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import surefoot
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from surefoot.config import load
from surefoot.config.load import load_config
from surefoot.errors import ConfigError, StateError, StorageError, SurefootError
from surefoot.storage import run_folder
from surefoot.storage.run_folder import RunFolder

DEPTH = "a/b/c/d/work"
"""How deep the current folder lies in the sandbox: more steps than any name here can climb."""
HOSTILE = [
    "../x", "../../x", "..", ".", "", "x/../../y", "/x", "//x", "a/b", "a\\b", "\0", "a\0b", "a\nb", "a\rb", "a\x1b[2J",
    "x" * 64, "x" * 65, "x" * 300, "é" * 200, "CON", "nul", "aux.txt", "COM1", "-rf", "--help", "~", "~root",
    "~nobody_of_that_name/x", "$HOME", "$(id)", "`id`", "%2e%2e", "a b", " ", ".hidden", "x.", "x..y", "раураl", "ｘ", "x\u202egpj",
    "x\u200b", "\ud800", "\udcff", "\ufeffx", "a:b", "*", "?", "|", "<", "|id", ";id", "\u2025/x", "\u2024\u2024/x", "．．/x",
]  # fmt: skip
names = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(max_size=80),
    st.lists(st.sampled_from(["..", ".", "x", "", "\0", "é" * 130, "runs"]), min_size=1, max_size=4).map("/".join),
)


@contextmanager
def sandbox() -> Iterator[tuple[Path, Path]]:
    """A folder with a current folder deep inside it, and bait around."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        here = top / DEPTH
        here.mkdir(parents=True)
        for bait in (top / "bait", here.parent / "bait"):
            bait.write_text("untouched")
        yield top, here


def tree(top: Path) -> set[str]:
    """Everything below, links not followed."""
    return {os.path.join(folder, name) for folder, *found in os.walk(top) for names in found for name in names}


def created_by(name: str, output_dir: str | None, here: Path, top: Path) -> tuple[set[str], RunFolder | None]:
    """What came into being when a run of this name was made; errors of ours only."""
    before = tree(top)
    try:
        folder = RunFolder.create(None if output_dir is None else Path(output_dir), name, here)
    except SurefootError as error:
        assert isinstance(error, ConfigError | StateError | StorageError), repr(error)
        folder = None
    return tree(top) - before, folder


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=names)
@example(name="run")
def test_whatever_a_run_is_called_it_stays_a_child_of_runs(name: str) -> None:
    with sandbox() as (top, here):
        made, folder = created_by(name, None, here, top)
        assert all(Path(path) == here / "runs" or here / "runs" in Path(path).parents for path in made), made
        if folder is not None:
            assert folder.root.resolve().parent == (here / "runs").resolve()
            assert folder.root.name.endswith(f"-{name}")
        else:
            assert not made, "a name that is refused leaves nothing behind"


def test_names_that_lead_elsewhere_are_refused_and_plain_ones_are_not() -> None:
    plain = {"x" * 64, "CON", "nul", "aux.txt", "COM1", "x."}
    with sandbox() as (top, here):
        accepted = {name for name in HOSTILE if created_by(name, None, here, top)[1] is not None}
    assert accepted == plain, "of these, the time before them makes even reserved names harmless"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=names.filter(lambda text: not text.startswith(("/", "~")) and text != "none"))  # none: left out
def test_an_output_dir_makes_itself_and_nothing_else(text: str) -> None:
    """The user may put a run anywhere; what must not happen is that it ends up, or leaves traces, somewhere else."""
    with sandbox() as (top, here):
        try:
            config = load_config(None, [f"output_dir={text}"]).config
        except ConfigError as error:
            assert error.exit_code == 2
            return
        assert config.output_dir is not None
        target = Path(os.path.normpath(here / config.output_dir))
        made, folder = created_by("run", config.output_dir, here, top)
        assert all(
            Path(path) == target or target in Path(path).parents or Path(path) in target.parents for path in made
        )
        assert (folder is None) == (not made)


@pytest.mark.parametrize("text", ["\0", "a\nb", "x" * 300, "é" * 200, "a/" * 2500, "\x1b[2J", "~nobody_of_that_name/x"])
@pytest.mark.parametrize("key", ["output_dir", "tasks", "model", "replay_pairs", "eval_metric"])
def test_a_path_that_cannot_be_is_refused_with_its_key_before_anybody_opens_it(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = ") as caught:
        load_config(None, [f"{key}={text}", *(["beta_replay=1.0"] if key == "replay_pairs" else [])])
    assert not {"\0", "\x1b"} & set(str(caught.value)), "and it is shown in plain characters"


@pytest.mark.parametrize("key", ["output_dir", "system_prompt", "tasks", "run_name"])
def test_half_a_surrogate_pair_in_yaml_is_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    head = {"model": "pebble", "tasks": "builtin:sums"}
    path.write_text(
        "".join(f"{name}: {value}\n" for name, value in head.items() if name != key) + f'{key}: "\\ud800"\n'
    )
    with pytest.raises(ConfigError, match=key):
        load_config(path)


# -- links ---------------------------------------------------------------------------------------------
def test_a_link_that_leads_nowhere_is_not_followed() -> None:
    with sandbox() as (top, here):
        (here / "out").symlink_to(top / "elsewhere")
        made, folder = created_by("run", "out", here, top)
        assert (made, folder) == (set(), None)
        assert not (top / "elsewhere").exists()


def test_a_link_to_a_folder_that_holds_something_is_refused_and_nothing_is_written_there() -> None:
    with sandbox() as (top, here):
        (top / "precious").mkdir()
        (top / "precious" / "file").write_text("mine")
        (here / "out").symlink_to(top / "precious")
        assert created_by("run", "out", here, top) == (set(), None)


def test_a_link_in_a_circle_is_a_typed_refusal() -> None:
    with sandbox() as (top, here):
        (here / "out").symlink_to(here / "out")
        assert created_by("run", "out", here, top) == (set(), None)
        assert created_by("run", "out/deeper", here, top) == (set(), None)


def test_a_link_planted_at_the_default_place_is_stepped_around() -> None:
    import datetime

    now = datetime.datetime(2030, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    with sandbox() as (top, here):
        (here / "runs").mkdir()
        (top / "elsewhere").mkdir()
        (here / "runs" / "20300102-030405-run").symlink_to(top / "elsewhere")
        folder = RunFolder.create(None, "run", here, now=now)
        assert folder.root.name != "20300102-030405-run"
        assert list((top / "elsewhere").iterdir()) == []


# -- through the real command, and with the rule taken out -----------------------------------------------
@pytest.mark.parametrize(
    "word", ["run_name=../../escaped", "run_name=/escaped", "output_dir=a\nb", f"output_dir={'x' * 300}"]
)
def test_the_command_refuses_with_2_and_writes_nothing(word: str) -> None:
    with sandbox() as (top, here):
        before = tree(top)
        ran = surefoot("train", word, cwd=here, run="", env={"PYTHONDONTWRITEBYTECODE": "1"})
        assert ran.code == 2, ran.err
        assert word.partition("=")[0] in ran.err
        assert tree(top) == before


def test_planted_bug_without_the_rule_a_name_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_check_slug", lambda name: None)
    with sandbox() as (top, here):
        _, folder = created_by("x/deeper", None, here, top)
        assert folder is not None
        assert folder.root.resolve().parent != (here / "runs").resolve()


def test_planted_bug_without_the_look_at_paths_a_long_one_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_not_a_path", lambda text: None)
    assert load_config(None, [f"output_dir={'x' * 300}"]).config.output_dir
