from __future__ import annotations

import pytest

from surefoot.errors import ConfigError
from surefoot.harness.suites.run import REQUIRED, dryrun_of, extra_env, settings_from_env, watch_interval, words_of

CLUSTER = dict.fromkeys(REQUIRED, "x y")


@pytest.mark.parametrize("name", REQUIRED)
def test_each_required_variable_is_named_when_it_is_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"not set: {name}\n"):
        settings_from_env({key: value for key, value in CLUSTER.items() if key != name})


def test_mounts_may_be_empty_but_the_others_may_not() -> None:
    assert settings_from_env(CLUSTER | {"MOUNTS": ""}).mounts == ""
    with pytest.raises(ConfigError, match="ACCOUNT"):
        settings_from_env(CLUSTER | {"ACCOUNT": ""})


def test_values_arrive_as_they_are() -> None:
    settings = settings_from_env(CLUSTER | {"EXTRA_ENV": "A='it is' B=\"$C\" D=", "EXCLUDE_GRES": "1"})
    assert settings.env == {"HF_HOME": "x y", "HF_DATASETS_CACHE": "x y", "A": "it is", "B": "$C", "D": ""}
    assert (settings.account, settings.gres) == ("x y", False)


@pytest.mark.parametrize("text", ["A", "1A=2", "A-B=1", "=1", "A='x", "HF_TOKEN=abc"])
def test_extra_variables_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        extra_env(text)


def test_extra_words_are_split_like_a_shell_would() -> None:
    assert words_of("EXTRA_SCRIPT_ARGS", "a 'b c' \"d's\"") == ("a", "b c", "d's")
    assert words_of("EXTRA_SCRIPT_ARGS", "") == ()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_an_interval_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="WATCH_INTERVAL"):
        watch_interval({"WATCH_INTERVAL": text})
    assert watch_interval({}) == 60


def test_a_dry_run_is_0_1_or_2() -> None:
    assert [dryrun_of(e) for e in ({}, {"DRYRUN": "1"}, {"DRYRUN": "2"}, {"DRYRUN": "0"})] == [0, 1, 2, 0]
    with pytest.raises(ConfigError, match="DRYRUN"):
        dryrun_of({"DRYRUN": "yes"})
