"""Finding reward functions, and the two that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.errors import RewardError
from surefoot.rewards.functions import builtin_scorer, exact_answer, reasoning_gym_score
from surefoot.system.user_code import load_function


def write(folder: Path, text: str, name: str = "my_rewards.py") -> Path:
    (folder / name).write_text(text)
    return folder


def test_a_function_is_loaded_from_a_file_beside_the_config(tmp_path: Path) -> None:
    base = write(tmp_path, "def score(prompts, completions, **columns):\n    return [len(c) for c in completions]\n")
    assert load_function("my_rewards.py:score", base)(["p"], ["abc"]) == [3]


def test_two_functions_of_one_file_share_its_state(tmp_path: Path) -> None:
    base = write(tmp_path, "seen = []\ndef a(**_): seen.append(1)\ndef b(**_): return seen\n")
    load_function("my_rewards.py:a", base)()
    assert load_function("my_rewards.py:b", base)() == [1]


def test_two_files_of_one_name_do_not_shadow_each_other(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, f"def score(**_): return {name!r}\n")
    assert [load_function(f"{name}/my_rewards.py:score", tmp_path)() for name in ("one", "two")] == ["one", "two"]


def test_a_helper_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path, "GOLD = 7\n", "helper_of_this_very_test.py")
    base = write(tmp_path, "from helper_of_this_very_test import GOLD\ndef score(**_): return GOLD\n")
    assert load_function("my_rewards.py:score", base)() == 7


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("my_rewards.py:scoer", ["no function 'scoer'", "did you mean score"]),
        ("my_reward.py:score", ["does not exist", "did you mean my_rewards.py"]),
        ("my_rewards.py:GOLD", ["is a int, not a function"]),
        ("my_rewards.py", ["does not name a file and a function", "my_rewards.py:score"]),
        ("nowhere/my_rewards.py:score", ["does not exist"]),
        ("syntax.py:score", ["cannot be loaded", "SyntaxError", "line 2"]),
        ("raises.py:score", ["cannot be loaded", "ZeroDivisionError", "line 3"]),
        ("exits.py:score", ["cannot be loaded", "SystemExit"]),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_nearest_names(tmp_path: Path, spec: str, words: list[str]) -> None:
    write(tmp_path, "GOLD = 1\ndef score(**_): return []\n")
    write(tmp_path, "x = 1\ndef score(:\n", "syntax.py")
    write(tmp_path, "x = 0\n\n1 / x\n", "raises.py")
    write(tmp_path, "raise SystemExit(0)\n", "exits.py")
    with pytest.raises(RewardError) as caught:
        load_function(spec, tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.exit_code == 4


def test_a_file_that_failed_to_load_is_not_remembered_as_loaded(tmp_path: Path) -> None:
    base = write(tmp_path, "1 / 0\n")
    with pytest.raises(RewardError):
        load_function("my_rewards.py:score", base)
    write(tmp_path, "def score(**_): return 'mended now'\n")
    assert load_function("my_rewards.py:score", base)() == "mended now"


def test_exact_answer_wants_the_whole_answer_and_nothing_else() -> None:
    completions = [" 42\n", "42.", "4 2", "", "x42"]
    assert exact_answer(["17+25="] * 5, completions, ["42"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_exact_answer_reads_messages_and_numbers() -> None:
    assert exact_answer([[]], [[{"role": "assistant", "content": "42 "}]], [42]) == [1.0]


def test_exact_answer_abstains_where_there_is_no_answer_to_compare_with() -> None:
    assert exact_answer(["p", "p"], ["None", ""], [None, None]) == [None, None]


def test_reasoning_gym_scores_its_own_answers_by_its_own_rules() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("basic_arithmetic", size=1, seed=1)[0]
    completions = [f" {entry['answer']}\n", "nonsense", [{"role": "assistant", "content": entry["answer"]}]]
    marks = reasoning_gym_score(
        ["p"] * 3, completions, ["basic_arithmetic"] * 3, [entry] * 3, answer=[entry["answer"]] * 3
    )
    assert marks[0] == marks[2] == 1.0
    assert marks[1] < 0.1


def test_a_task_sets_scorer_is_found_by_name_and_a_misspelt_one_is_refused() -> None:
    assert builtin_scorer("exact") is exact_answer
    with pytest.raises(RewardError, match="did you mean exact"):
        builtin_scorer("exakt")
