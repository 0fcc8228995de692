"""Secrets leave a text however they are spelled; everything else stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from surefoot.system import text as safe_text
from surefoot.system.text import (
    _COMMON,
    HIDDEN,
    is_secret_name,
    printable,
    redact,
    redact_values,
    remember,
    spelled_out,
)

ODD = "pä\"ss\\wo\trd'☂ 9"
SECRET_NAMES = """HF_TOKEN HUGGING_FACE_HUB_TOKEN wandb_api_key WANDB_APIKEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID DB_PASSWORD
PGPASSWORD SSH_PASSPHRASE OPENAI_API_KEY GITHUB_PAT SMTP_PASS MYSQL_PWD SENTRY_DSN AZURE_CLIENT_SECRET SESSION_COOKIE
GOOGLE_CREDENTIALS AZURE_STORAGE_CONNECTION_STRING SIGNING_KEY AZURE_STORAGE_KEY OPENAI_KEY ENCRYPTION_KEY SSH_KEY
NGC_CLI_KEY JWT SLURM_JWT HMAC_SALT SLACK_WEBHOOK_URL SLACK_WEBHOOK DEPLOY_KEYS""".split()


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_the_value_of_a_secret_looking_variable_is_hidden(name: str) -> None:
    assert redact("before canary-value.* after", {name: "canary-value.*"}) == f"before {HIDDEN} after"


@pytest.mark.parametrize(
    "name",
    """PATH PWD MODEL TOKENIZERS_PARALLELISM SECRETS_DIR TOKEN_FILE KEYMAP SSH_PUBLIC_KEY HOTKEY WEBHOOK_PATH SALTED
    DATABASE_URL JWT_HOME""".split(),
)
def test_ordinary_variables_and_names_for_places_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)
    assert redact("ordinary-value", {name: "ordinary-value"}) == "ordinary-value"


@pytest.mark.parametrize("value", ["", "1", "1234567", "disabled", "Required", " \t   \n   "])
def test_short_values_and_common_words_hide_nothing(value: str) -> None:
    text = f"a {value} b disabled 1234567"
    assert redact(text, {"A_TOKEN": value}) == text


def test_a_path_that_exists_is_not_hidden_though_its_variable_looks_secret(tmp_path: Path) -> None:
    text = f"{tmp_path}/run/config.toml"
    assert redact(text, {"MY_CREDENTIALS": str(tmp_path)}) == text
    assert redact("/absent/but/secret+", {"MY_SECRET": "/absent/but/secret+"}) == HIDDEN


def test_the_real_environment_is_looked_at_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redact("value-of-mine") == "value-of-mine"
    monkeypatch.setenv("SOME_TOKEN", "value-of-mine")
    assert redact("value-of-mine") == HIDDEN


@pytest.mark.parametrize(
    "spell",
    [
        str, repr, json.dumps, lambda s: json.dumps(s, ensure_ascii=False), quote, lambda s: quote(s, safe=""), spelled_out,
        lambda s: repr({"k": s}), lambda s: json.dumps(json.dumps({"k": s})), lambda s: repr(s.encode()),
        lambda s: str(KeyError(repr(s))), lambda s: f"x={s};", lambda s: repr(ValueError(s)),
    ],
)  # fmt: skip
def test_a_secret_is_hidden_however_it_is_spelled(spell: object) -> None:
    text = spell(ODD)  # type: ignore[operator]
    shown = redact(f"<{text}>", {"A_PASSWORD": ODD})
    assert HIDDEN in shown
    assert not any(part in shown for part in ("ss\\", "wo", "rd", "☂", "2602"))


@settings(deadline=None)
@given(st.text(min_size=8).filter(lambda s: len(s.strip()) >= 8 and s.strip().lower() not in _COMMON))
@example("/proc/self/fdx")
def test_whatever_the_secret_it_does_not_survive(secret: str) -> None:
    value = secret.strip()
    assume(not (os.path.isabs(value) and os.path.exists(value)))  # the name of a file that holds a secret is none
    for text in (value, repr(value), json.dumps(value)):
        assert value not in redact(f"a {text} b", {"A_TOKEN": secret})


def test_a_secret_inside_another_is_hidden_whole() -> None:
    assert redact("abcdefgh-long abcdefgh", {"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefgh-long"}) == f"{HIDDEN} {HIDDEN}"


def test_every_line_of_a_secret_of_many_lines_is_hidden() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG\nSecondLineOfTheKey==\n-----END KEY-----"
    shown = redact("    MIIEvQIBADANBgkqhkiG\n    SecondLineOfTheKey==", {"SSH_PRIVATE_KEY": key})
    assert shown.split() == [HIDDEN, HIDDEN]
    block = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4\nabc\n-----END RSA PRIVATE KEY-----"
    assert redact(f"x\n{block}\ny", {}) == f"x\n{HIDDEN}\ny"


@pytest.mark.parametrize(
    "shape",
    [
        "hf_" + "a" * 20, "sk-" + "b1" * 10, "sk-proj-" + "x9_-" * 6, "ghp_" + "C" * 30, "github_pat_" + "a" * 22,
        "AKIA" + "A1" * 8, "xoxb-1234567890", "AIza" + "x" * 35, "glpat-" + "k" * 20, "npm_" + "Z" * 36,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "nvapi-" + "q" * 30, "wandb_v1_" + "w" * 20,
    ],
)  # fmt: skip
def test_known_shapes_are_hidden_without_a_variable(shape: str) -> None:
    assert redact(f"key={shape}, next", {}) == f"key={HIDDEN}, next"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass1@example.org/x", "https://***@example.org/x"),
        ("postgresql+psycopg://me:p%40ss@example.org:5432/db", "postgresql+psycopg://***@example.org:5432/db"),
        ("https://onlytoken@example.org/x.git", "https://***@example.org/x.git"),
        ("https://me:pa/ss@example.org/x", "https://***@example.org/x"),
        ("https://me:pa@ss@example.org/x", "https://***@example.org/x"),
        ("no folder /data/https:/me:pass@example.org/x", "no folder /data/https:/***@example.org/x"),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("{'Authorization': 'Basic dTpw'}", "{'Authorization': 'Basic ***'}"),
        ("curl -H 'x-api-key: abc'", "curl -H 'x-api-key: ***'"),
        ("sent Bearer abcdef0123456", "sent Bearer ***"),
        ("Set-Cookie: sid=abcd; path=/", "Set-Cookie: ***"),
        ("GET /x?page=2&api_key=abcdef&y=1", "GET /x?page=2&api_key=***&y=1"),
        ("connect(password='hunter22', user='me')", "connect(password='***', user='me')"),
        ('{"client_secret": "abcd efgh"}', '{"client_secret": "***"}'),
        ("OPENAI_API_KEY=abcdefgh1 PATH=/bin", "OPENAI_API_KEY=*** PATH=/bin"),
        ("OPENAI_KEY=abcdefgh1 JWT=abcdefgh1 HMAC_SALT=abcdefgh1", "OPENAI_KEY=*** JWT=*** HMAC_SALT=***"),
        ("SLACK_WEBHOOK_URL=https://example.org/T0/B0/x y", "SLACK_WEBHOOK_URL=*** y"),
        ("password: hunter2hunter2", "password: ***"),
        ("DB password = correcthorse, user = me", "DB password = *** user = me"),
        ("token = abcdefghijklmnopqrstuvwx", "token = ***"),
        ("token: abcdef12", "token: ***"),
        ("api_key = abcdefgh1\nnext", "api_key = ***\nnext"),
        ("push --token abcdef --name x", "push --token *** --name x"),
        ("push --hf-token=abcdef1 --db-password abcdefgh", "push --hf-token=*** --db-password ***"),
        ("Name=x;AccountKey=abc+/12==;Suffix=y", "Name=x;AccountKey=***;Suffix=y"),
        ("SharedAccessKeyName=n;SharedAccessKey=abcdef=", "SharedAccessKeyName=n;SharedAccessKey=***"),
    ],
)
def test_credentials_are_hidden_by_where_they_stand(text: str, shown: str) -> None:
    assert redact(text, {}) == shown


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/a:b@c", "http://localhost:8000/v1/model@main", "eos_token = '<|im_end|>'",
        "pad_token: <|endoftext|>", "password = os.environ['DB_PASSWORD']", "max_tokens=4096", "the bearer of bad news",
        "task-abcdefghijklmnop1234", "sk-learn-contrib-examples", "hf_transfer is not installed", "user@example.org",
        "step 7/150  reward 0.5  left 3m 05s", "0123456789abcdef0123456789abcdef01234567",
        "secret santa, token ring, cookie jar", "the secret: everything counts", "next token: something",
        "--max-tokens 4096 --eos-token end_of_text", "password: str = Field()", "token = tokens[i + 1]", "key = value_of_it",
        "token: Optional[str]", "SSH_PUBLIC_KEY=abcdefgh1", "--token --name", "größer ≥ 3, 東京\tok\n",
    ],
)  # fmt: skip
def test_text_without_a_secret_stays_as_it_is(text: str) -> None:
    assert redact(text, {"A_TOKEN": "something-else"}) == text
    assert printable(text) == text


HOSTILE = (
    "://a:", "eyJ-", "password='", "Bearer a ", "A_TOKEN", "sk-", "-----BEGIN PRIVATE KEY-----", "authorization: ", "&x",
    "A", "?token=", "://", "cookie:", "\"'", "password: ", "password=a.", "token = ", "token=aaaaaaaa ", "--token ", "--a-a-a-", "--token a",
    "AccountKey=", "A_KEY=", "_KEY", "wandb_v1_", "token: a.a", "secret:        ", "WEBHOOK_URL", "accountkey=;",
)  # fmt: skip


def test_hostile_text_costs_time_in_proportion_to_its_length() -> None:
    """Under a deadline of the operating system's: a pattern that backtracks would need hours, not seconds."""
    script = (
        "import signal; signal.alarm(60)\n"
        "from surefoot.system.text import redact\n"
        f"for piece in {HOSTILE!r}: redact(piece * (300_000 // len(piece)), {{'A_TOKEN': 'abcdefgh'}})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, timeout=120)
    assert done.returncode == 0


def test_a_secret_is_remembered_when_its_variable_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_text, "_remembered", frozenset())
    remember({"GONE_KEY": "value-that-went", "PLAIN": "value-of-nobody"})
    assert redact("value-that-went, value-of-nobody") == f"{HIDDEN}, value-of-nobody"
    assert redact("value-that-went", {}) == "value-that-went", "whoever names an environment means that one"


@pytest.mark.parametrize("char", "\u2028\u2029\x85\u202e\u200b\x1b")
def test_what_a_reader_takes_for_the_end_of_a_line_is_spelled_out(char: str) -> None:
    assert printable(f"one{char}two") == f"one{char.encode('unicode_escape').decode()}two"
    assert len(printable(f"one{char}two").splitlines()) == 1


def test_planted_speller_that_lets_separators_through_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_text, "_moves", lambda char: unicodedata.category(char)[0] == "C")
    assert len(printable("one\u2028two").splitlines()) == 2


def test_data_is_redacted_at_every_depth_and_keeps_its_form() -> None:
    value = {"a": ["hf_" + "x" * 20, 1, None, True, 0.5], "b": ({"c": "https://u:p@example.org"},)}
    assert redact_values(value) == {"a": [HIDDEN, 1, None, True, 0.5], "b": ({"c": "https://***@example.org"},)}


def test_planted_redactor_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.system.text.redact", lambda text: text)
    assert printable("ghp_" + "C" * 30) != HIDDEN
