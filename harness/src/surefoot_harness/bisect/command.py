"""The whole search on one screen: prepare, verify both ends, narrow down, put everything back, say what was found.

Owns       the order of things, and the exit codes: 0 found, 2 refused, 3 aborted, 75 stopped, 125 cannot tell.
Promises   the log is saved before anything is put back; the tree and the branch come back on every path.

Read next: `tester.py`, what an exit code means; `noisy.py`, when one run is not enough.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from surefoot_harness.bisect import evidence as logs
from surefoot_harness.bisect import overrides, selfcopy
from surefoot_harness.bisect.evidence import STATUS, BisectOutcome, CommitRecord, EvidenceFolder, LogReplay, Measure
from surefoot_harness.bisect.noisy import NoisySearch
from surefoot_harness.bisect.options import INTRODUCED, BisectOptions, with_environment
from surefoot_harness.bisect.repository import (
    BAD,
    GOOD,
    SKIP,
    BisectSession,
    Repository,
    Stop,
    fetch_all,
    introduced,
    older_name,
)
from surefoot_harness.bisect.tester import AbortError, Tester
from surefoot_harness.errors import ConfigError, StoppedError
from surefoot_harness.own_command import own_name
from surefoot_harness.system.git import OwnPrograms, own_programs, root_of, run_git
from surefoot_harness.tables import table

# -- What has to hold before the tree is touched; each refusal says how to mend it (exit 2) -------


_UNFINISHED = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")


def open_tree(options: BisectOptions) -> Repository:
    """The work tree, when it is clean and nobody else is bisecting, merging or rebasing in it."""
    root = root_of(options.folder)
    if root is None:
        raise ConfigError(f"{options.folder} is not in a git work tree", "commits are searched", "cd into a repository")
    if run_git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", check=False).returncode:
        raise ConfigError("this repository has no commit", "commits are searched", "commit something first")
    _no_unfinished_work(root)
    own = own_programs(root)
    _no_own_filters(own)
    _no_hook_on_references(root)
    _clean(root)
    return Repository(root, own)


def _no_unfinished_work(root: Path) -> None:
    if _git_path(root, "BISECT_LOG").exists():
        raise ConfigError("a bisect is in progress here", "two would move the same tree", "git bisect reset")
    for name in _UNFINISHED:
        if _git_path(root, name).exists():
            raise ConfigError(f"{name} exists: something is half done here", "it would be lost", "finish or abort it")


def _no_own_filters(own: OwnPrograms) -> None:
    if own.filters:
        raise ConfigError(
            f"this repository's own config names programs that change files on checkout: {', '.join(own.filters)}",
            "what a repository names is not run, and without it other files would be tested than yours",
            "if you trust it, put it into your own config: git config --global NAME VALUE, with the same value",
        )


def _no_hook_on_references(root: Path) -> None:
    """`git bisect` runs this one hook even when core.hooksPath says that there are none."""
    hook = root / run_git(root, "rev-parse", "--git-common-dir").stdout.rstrip("\n") / "hooks" / "reference-transaction"
    if os.access(hook, os.X_OK):
        raise ConfigError(
            f"this repository has a hook that git bisect would run at every step: {hook}",
            "what a repository names is not run, and git can not be told to leave this one out",
            f"put it aside while you bisect: mv {shlex.quote(str(hook))} {shlex.quote(str(hook) + '.off')}",
        )


def _git_path(root: Path, name: str) -> Path:
    return root / run_git(root, "rev-parse", "--git-path", name).stdout.rstrip("\n")


def _clean(root: Path) -> None:
    words = ("status", "--porcelain", "-z", "--untracked-files=no")
    own = _names(run_git(root, *words, "--ignore-submodules=all").stdout)
    if own:
        raise ConfigError(
            f"the work tree has changes that are not committed: {', '.join(own[:5])}",
            "checkouts would mix them into every commit",
            "git stash, or commit them",
        )
    inside = _names(run_git(root, *words, "--ignore-submodules=none").stdout)
    if inside:
        raise ConfigError(
            f"submodules are not clean: {', '.join(inside[:5])}",
            "their state is part of the commit",
            "git submodule update --init --recursive, after saving what is changed in them",
        )


def _names(status: str) -> list[str]:
    return [entry[3:] for entry in status.split("\0") if entry[2:3] == " "]


def ends(repository: Repository, options: BisectOptions) -> tuple[str, str, list[str]]:
    """GOOD and BAD as commits, and notes for the user."""
    if not options.bad or not options.good:
        raise ConfigError(
            "GOOD and BAD are both needed",
            "the culprit is searched between them",
            f"{own_name()} bisect --good v1.0 --bad HEAD -- ./t.sh (or set GOOD and BAD)",
        )
    bad = _commit(repository, options.bad, "BAD")
    notes: list[str] = []
    if options.good == INTRODUCED:
        path = os.path.relpath(options.folder / (options.good_path or ""), repository.root)
        good = introduced(repository, path, bad)
        notes.append(f"GOOD is {good[:12]}, which introduced {path}: {repository.subject(good)}")
        old = older_name(repository, path, good)
        if old:
            notes.append(f"before that it was called {old}; to search further back, name GOOD and use the old name")
    else:
        good = _commit(repository, options.good, "GOOD")
    if good == bad:
        raise ConfigError(f"GOOD and BAD are the same commit {good[:12]}", "nothing lies between", "choose two commits")
    if not repository.is_ancestor(good, bad):
        raise ConfigError(
            f"GOOD {good[:12]} is not an ancestor of BAD {bad[:12]}",
            "the change from good to bad has to lie on the way from one to the other",
            f"use their common ancestor as GOOD: git merge-base {good[:12]} {bad[:12]}",
        )
    return good, bad, notes


def _commit(repository: Repository, name: str, role: str) -> str:
    commit = repository.commit(name)
    if commit is None:
        raise ConfigError(
            f"{role} {name!r} is no commit here",
            "the search needs both ends",
            "check the name; in a shallow clone run: git fetch --unshallow",
        )
    return commit


# -- What the user reads. A reader who has gone (a closed terminal) never stops the way home ------


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


def tested(visit: CommitRecord) -> None:
    """One line for a commit that was judged."""
    say(f"{visit.answer or '?':5} {visit.commit[:12]}  {visit.reason}  {visit.subject}")


def finish(repository: Repository, evidence: EvidenceFolder, outcome: BisectOutcome) -> None:
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


def resume_line(options: BisectOptions, log: Path) -> str:
    """A line that can be pasted into a shell and goes on from `log`."""
    words = [*selfcopy.called_as(), "bisect"]
    for name, value in _settings(options):
        words += [name] if value is None else [f"{name}={value}"]
    variable = f"BISECT_REPLAY_LOG={shlex.quote(str(log))}"
    return f"cd {shlex.quote(str(options.folder))} && {variable} {shlex.join([*words, '--', *options.command])}"


def _settings(options: BisectOptions) -> list[tuple[str, str | None]]:
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
    default = BisectOptions(folder=options.folder)
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


# -- The whole search on one screen: prepare, verify both ends, narrow down, put everything back, say what was found


FOUND, CANNOT_TELL = 0, 125


def bisect(options: BisectOptions) -> int:
    """Find the first bad commit; the exit code."""
    options = with_environment(options)
    repository = open_tree(options)
    replay = logs.read_log(options.replay, repository) if options.replay else None
    if replay is not None:
        good, bad, notes = replay.good, replay.bad, [f"resuming from {options.replay}"]
    else:
        good, bad, notes = ends(repository, options)
    for line in notes:
        say(line)
    if not options.command:
        raise ConfigError("no command was given", "it judges each commit", "end with: -- CMD, as in: -- ./t.sh")
    os.chdir(repository.root)  # a checkout may remove the folder that we stand in
    with Stop() as stop:
        return _Bisect(options, repository, stop, good, bad, replay).run()


@dataclass
class _Bisect:
    """One search from the first checkout to the last."""

    options: BisectOptions
    repository: Repository
    stop: Stop
    good: str
    bad: str
    replay: LogReplay | None

    def __post_init__(self) -> None:
        save_dir = self.options.save_dir or self.repository.root / "bisect-logs"
        command = overrides.argv(self.options)
        self.evidence = EvidenceFolder(save_dir, self.bad, command, overrides.as_json(self.options))
        files = overrides.named_files(self.repository, self.options, [self.good, self.bad])
        self.tester = Tester(self.repository, self.options, self.stop, self.evidence, files, self._measure())
        self.session = BisectSession(self.repository)
        self.noisy = NoisySearch(self.tester, self.options, say) if self.options.noisy else None
        self.verified = self.replay is not None and not self.replay.unverified
        self.marked = False

    def _measure(self) -> Measure | None:
        if self.options.metric is None:
            return None
        at = self.options.folder / self.options.metrics_at if self.options.metrics_at else None
        return Measure(self.options.metric, self.options.stat, at, self.options.metrics_at)

    def run(self) -> int:
        """Search, and whatever happens: save what was learnt, then put everything back."""
        reason = "error"
        try:
            outcome = self._search()
            reason = "done" if outcome.found else "cannot-tell"
        except StoppedError:
            reason = "stopped"
            raise
        except AbortError:
            reason = "aborted"
            raise
        except ConfigError:
            reason = "refused"
            raise
        finally:
            try:
                if self._worth_saving(reason):
                    self._save(reason)
            finally:
                self._put_back(keep=self.options.no_reset and reason != "refused")
        finish(self.repository, self.evidence, outcome)
        return FOUND if outcome.found else CANNOT_TELL

    def _worth_saving(self, reason: str) -> bool:
        if reason == "refused":  # nothing was learnt, unless it was by many runs
            return bool(self.noisy and self.noisy.samples)
        return reason != "done" or self.options.save_log

    def _search(self) -> BisectOutcome:
        self._script_to_edit()
        for line in fetch_all(self.repository, self.stop):
            say(line)
        if self.noisy is not None:
            return self.noisy.run(self.good, self.bad, self.replay)
        self.session.open()  # before the first checkout: git notes here where the user was
        if not self.verified:
            self._verify()
        self._enter_marks()
        return self._narrow()

    def _script_to_edit(self) -> None:
        if self.options.sed:
            path, tracked = overrides.script(self.repository, self.options, self.tester.files)
            if not tracked:
                say(f"warning: {path} is not tracked; git will not restore it (surefoot does, after each run)")

    def _verify(self) -> None:
        """GOOD has to be good and BAD bad, else there is nothing to find."""
        if not self.options.skip_good_check:
            self._verify_good()
        visit = self.tester.test(self.bad)
        tested(visit)
        if visit.answer == GOOD:
            raise ConfigError(
                f"nothing to bisect: BAD {self.bad[:12]} passes", "there is no failure to explain", "check BAD and CMD"
            )
        if visit.answer == SKIP:
            raise ConfigError(
                f"BAD {self.bad[:12]} cannot be tested: {visit.reason}", "it has to fail", "mend that first"
            )
        self.verified = True

    def _verify_good(self) -> None:
        other = "SKIP_GOOD_CHECK=1 if you are sure of it, or --good=introduced PATH"
        name = self.tester.missing(self.good)
        if name is not None:
            raise ConfigError(
                f"GOOD {self.good[:12]} cannot be tested: {name} does not exist there", "missing is not good", other
            )
        visit = self.tester.test(self.good)
        tested(visit)
        if visit.answer == SKIP:
            raise ConfigError(f"GOOD {self.good[:12]} cannot be tested: {visit.reason}", "it has to pass", other)
        if visit.answer == BAD:
            raise ConfigError(
                f"GOOD {self.good[:12]} is bad: {visit.reason}",
                "the failure is older than GOOD",
                "choose an older GOOD",
            )

    def _enter_marks(self) -> None:
        for answer, commit in self.replay.marks if self.replay else [(BAD, self.bad), (GOOD, self.good)]:
            self.session.mark(answer, commit)
        self.marked = True

    def _narrow(self) -> BisectOutcome:
        while True:
            self.stop.check()
            standing = self.session.standing()
            if standing.next is None:
                return BisectOutcome(standing.candidates, standing.culprit is not None, runs=len(self.evidence.visits))
            visit = self.tester.test(standing.next)
            tested(visit)
            self.session.mark(visit.answer, visit.commit)

    def _save(self, reason: str) -> Path:
        """Write the log; say how to go on when there is something to go on with."""
        lines = [] if self.verified or self.noisy else [logs.note(logs.UNVERIFIED, True)]
        if self.noisy is not None:
            lines += [logs.note(logs.SAMPLE, sample) for sample in self.noisy.samples]
        lines += [logs.note(logs.RECORD, self.evidence.as_json(visit)) for visit in self.evidence.visits.values()]
        start = f"git bisect start '{self.bad}' '{self.good}'\n{self._skips()}"
        text = self.session.log() if self.marked else start
        path = logs.save_log(
            self.evidence.save_dir, self.tester.here or self.bad, reason, "\n".join([text, *lines, ""])
        )
        say(f"log saved: {path}")
        if reason != "done":
            say("resume with:\n" + resume_line(self.options, path))
        return path

    def _skips(self) -> str:
        skipped = [v.commit for v in self.evidence.visits.values() if v.answer == SKIP and v.commit != self.bad]
        return "\n".join(f"git bisect skip {commit}" for commit in skipped if self.noisy and commit != self.good)

    def _put_back(self, *, keep: bool) -> None:
        try:
            self.session.close(keep=keep)
        finally:
            try:
                if not keep:
                    self.repository.restore()
            finally:
                self.tester.close()
