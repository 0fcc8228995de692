"""What the user reads. A reader who has gone (a closed terminal) never stops the way home."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from surefoot.harness.bisect import selfcopy
from surefoot.harness.bisect.evidence import STATUS, Evidence, Visit
from surefoot.harness.bisect.options import Options
from surefoot.harness.bisect.outcome import Outcome
from surefoot.harness.bisect.repository import Repository
from surefoot.harness.tables import table


def say(text: str, *, to_stdout: bool = False) -> None:
    """Print one piece of news; progress goes to stderr, the result to stdout."""
    stream = sys.stdout if to_stdout else sys.stderr
    try:
        print(_printable(text), file=stream, flush=True)
    except (OSError, ValueError):
        return  # nobody listens any more; the exit code and the saved log still speak


def _printable(text: str) -> str:
    """Control and other unprintable characters spelled out: a commit message must not move the cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def tested(visit: Visit) -> None:
    """One line for a commit that was judged."""
    say(f"{visit.answer or '?':5} {visit.commit[:12]}  {visit.reason}  {visit.subject}")


def finish(repository: Repository, evidence: Evidence, outcome: Outcome) -> None:
    """Print the culprit or the candidates, and write `result.json`."""
    rows = [
        [str(STATUS[v.answer]), v.commit[:12], str(len(v.samples)), v.reason, v.subject]
        for v in evidence.visits.values()
    ]
    if rows:
        say(table("Commits", ["Status", "Commit", "Runs", "Reason", "Subject"], rows), to_stdout=True)
    for line in outcome.notes:
        say(line, to_stdout=True)
    sure = "" if outcome.confidence is None else f" (confidence {outcome.confidence:.3f}, {outcome.runs} runs)"
    if outcome.found:
        commit = outcome.candidates[0]
        say(f"first bad commit: {commit} {repository.subject(commit)}{sure}", to_stdout=True)
    else:
        say(f"cannot tell: the first bad commit is one of these{sure}", to_stdout=True)
        for commit in outcome.candidates:
            say(f"  {commit} {repository.subject(commit)}", to_stdout=True)
    evidence.finish(
        {
            "status": "PASS" if outcome.found else "INCOMPLETE",
            "culprit": outcome.candidates[0] if outcome.found else None,
            "candidates": list(outcome.candidates),
            "confidence": outcome.confidence,
            "runs": outcome.runs,
            "notes": list(outcome.notes),
            "commits": [evidence.as_json(visit) for visit in evidence.visits.values()],
        }
    )


def resume_line(options: Options, log: Path) -> str:
    """A line that can be pasted into a shell and goes on from `log`."""
    words = [*selfcopy.called_as(), "bisect"]
    for name, value in _settings(options):
        words += [name] if value is None else [f"{name}={value}"]
    variable = f"BISECT_REPLAY_LOG={shlex.quote(str(log))}"
    return f"cd {shlex.quote(str(options.folder))} && {variable} {shlex.join([*words, '--', *options.command])}"


def _settings(options: Options) -> list[tuple[str, str | None]]:
    """Every option that shapes the search, as it was resolved: also what came from the environment."""
    flags = {
        "--no-reset": options.no_reset, "--flaky": options.flaky, "--higher-is-worse": options.higher_is_worse,
        "--save-log": options.save_log, "--skip-good-check": options.skip_good_check,
        "--crash-is-bad": options.crash_is_bad,
    }  # fmt: skip
    one = {
        "--save-dir": options.save_dir, "--sed": options.sed, "--extra-args": options.extra_args,
        "--rebuild": options.rebuild, "--venv-cache": options.venv_cache, "--metric": options.metric,
        "--worse-than": options.worse_than, "--margin": options.margin, "--metrics-at": options.metrics_at,
    }  # fmt: skip
    numbers = {
        "--alpha": options.alpha,
        "--max-samples": options.max_samples,
        "--repeat": options.repeat,
        "--stat": options.stat,
    }
    default = Options(folder=options.folder)
    known = {"--alpha": default.alpha, "--max-samples": default.max_samples, "--repeat": 1, "--stat": default.stat}
    many = {
        "--set": options.sets, "--relax": options.relax, "--drop-check": options.drop_checks,
        "--skip-code": options.skip_codes, "--require-env": options.require_env,
    }  # fmt: skip
    found: list[tuple[str, str | None]] = [(name, None) for name, on in flags.items() if on]
    found += [(name, str(value)) for name, value in one.items() if value not in (None, "")]
    found += [(name, str(value)) for name, value in numbers.items() if value != known[name]]
    found += [(name, str(value)) for name, values in many.items() for value in values]
    if options.rates:
        found.append(("--rates", f"{options.rates[0]},{options.rates[1]}"))
    if (options.relax or options.drop_checks) and options.reason != default.reason:
        found.append(("--reason", options.reason))
    return found
