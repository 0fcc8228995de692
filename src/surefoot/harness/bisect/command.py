"""The whole search on one screen: prepare, verify both ends, narrow down, put everything back, say what was found.

Owns       the order of things, and the exit codes: 0 found, 2 refused, 3 aborted, 75 stopped, 125 cannot tell.
Promises   the log is saved before anything is put back; the tree and the branch come back on every path.

Read next: `tester.py`, what an exit code means; `noisy.py`, when one run is not enough.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import ConfigError, StoppedError
from surefoot.harness.bisect import logs, overrides, preconditions, report
from surefoot.harness.bisect.evidence import Evidence
from surefoot.harness.bisect.logs import Replay
from surefoot.harness.bisect.measure import Measure
from surefoot.harness.bisect.noisy import NoisySearch
from surefoot.harness.bisect.options import Options, with_environment
from surefoot.harness.bisect.outcome import Outcome
from surefoot.harness.bisect.repository import Repository
from surefoot.harness.bisect.session import BAD, GOOD, SKIP, Session
from surefoot.harness.bisect.signals import Stop
from surefoot.harness.bisect.submodules import fetch_all
from surefoot.harness.bisect.tester import AbortError, Tester

FOUND, CANNOT_TELL = 0, 125


def bisect(options: Options) -> int:
    """Find the first bad commit; the exit code."""
    options = with_environment(options)
    repository = preconditions.open_tree(options)
    replay = logs.read(options.replay, repository) if options.replay else None
    if replay is not None:
        good, bad, notes = replay.good, replay.bad, [f"resuming from {options.replay}"]
    else:
        good, bad, notes = preconditions.ends(repository, options)
    for line in notes:
        report.say(line)
    if not options.command:
        raise ConfigError("no command was given", "it judges each commit", "end with: -- CMD, as in: -- ./t.sh")
    os.chdir(repository.root)  # a checkout may remove the folder that we stand in
    with Stop() as stop:
        return _Bisect(options, repository, stop, good, bad, replay).run()


@dataclass
class _Bisect:
    """One search from the first checkout to the last."""

    options: Options
    repository: Repository
    stop: Stop
    good: str
    bad: str
    replay: Replay | None

    def __post_init__(self) -> None:
        save_dir = self.options.save_dir or self.repository.root / "bisect-logs"
        command = overrides.argv(self.options)
        self.evidence = Evidence(save_dir, self.bad, command, overrides.as_json(self.options))
        files = overrides.named_files(self.repository, self.options, [self.good, self.bad])
        self.tester = Tester(self.repository, self.options, self.stop, self.evidence, files, self._measure())
        self.session = Session(self.repository)
        self.noisy = NoisySearch(self.tester, self.options, report.say) if self.options.noisy else None
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
        report.finish(self.repository, self.evidence, outcome)
        return FOUND if outcome.found else CANNOT_TELL

    def _worth_saving(self, reason: str) -> bool:
        if reason == "refused":  # nothing was learnt, unless it was by many runs
            return bool(self.noisy and self.noisy.samples)
        return reason != "done" or self.options.save_log

    def _search(self) -> Outcome:
        self._script_to_edit()
        for line in fetch_all(self.repository, self.stop):
            report.say(line)
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
                report.say(f"warning: {path} is not tracked; git will not restore it (surefoot does, after each run)")

    def _verify(self) -> None:
        """GOOD has to be good and BAD bad, else there is nothing to find."""
        if not self.options.skip_good_check:
            self._verify_good()
        visit = self.tester.test(self.bad)
        report.tested(visit)
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
        report.tested(visit)
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

    def _narrow(self) -> Outcome:
        while True:
            self.stop.check()
            standing = self.session.standing()
            if standing.next is None:
                return Outcome(standing.candidates, standing.culprit is not None, runs=len(self.evidence.visits))
            visit = self.tester.test(standing.next)
            report.tested(visit)
            self.session.mark(visit.answer, visit.commit)

    def _save(self, reason: str) -> Path:
        """Write the log; say how to go on when there is something to go on with."""
        lines = [] if self.verified or self.noisy else [logs.note(logs.UNVERIFIED, True)]
        if self.noisy is not None:
            lines += [logs.note(logs.SAMPLE, sample) for sample in self.noisy.samples]
        lines += [logs.note(logs.RECORD, self.evidence.as_json(visit)) for visit in self.evidence.visits.values()]
        start = f"git bisect start '{self.bad}' '{self.good}'\n{self._skips()}"
        text = self.session.log() if self.marked else start
        path = logs.save(self.evidence.save_dir, self.tester.here or self.bad, reason, "\n".join([text, *lines, ""]))
        report.say(f"log saved: {path}")
        if reason != "done":
            report.say("resume with:\n" + report.resume_line(self.options, path))
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
