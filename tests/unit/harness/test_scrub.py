"""Secrets leave a text; everything else stays."""

from __future__ import annotations

import pytest

from surefoot.harness.scrub import HIDDEN, is_secret_name, scrub


@pytest.mark.parametrize("name", ["HF_TOKEN", "wandb_api_key", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "MY_APIKEY"])
def test_the_value_of_a_secret_looking_variable_is_hidden(name: str) -> None:
    assert is_secret_name(name)
    assert scrub("before pa$$w0rd.* after", {name: "pa$$w0rd.*"}) == f"before {HIDDEN} after"


def test_a_secret_inside_another_is_hidden_whole() -> None:
    variables = {"A_TOKEN": "abcdef", "B_TOKEN": "abcdef-long"}
    assert scrub("abcdef-long abcdef", variables) == f"{HIDDEN} {HIDDEN}"


@pytest.mark.parametrize("name", ["PATH", "HOME", "MODEL"])
def test_ordinary_variables_and_short_values_stay(name: str) -> None:
    assert not is_secret_name(name)
    assert scrub("value-of-it", {name: "value-of-it"}) == "value-of-it"
    assert scrub("12345", {"A_TOKEN": "12345"}) == "12345", "too short: it would hide ordinary words"
    assert scrub("x", {"A_TOKEN": ""}) == "x"


@pytest.mark.parametrize(
    "shape",
    ["hf_" + "a" * 20, "sk-" + "b1" * 10, "ghp_" + "C" * 30, "AKIA" + "A1" * 8, "xoxb-" + "1234567890"],
)
def test_known_shapes_are_hidden_without_a_variable(shape: str) -> None:
    assert scrub(f"token={shape}, next", {}) == f"token={HIDDEN}, next"


def test_a_password_in_an_address_is_hidden_and_the_host_stays() -> None:
    assert scrub("https://me:pass1@example.org/x", {}) == f"https://{HIDDEN}@example.org/x"
    assert scrub("https://example.org/a:b@c", {}) == "https://example.org/a:b@c"


def test_the_real_environment_is_used_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "value-of-mine")
    assert scrub("value-of-mine") == HIDDEN
