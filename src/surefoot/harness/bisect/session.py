"""git's own bisect, asked to keep the books but not to move the tree.

`git bisect start --no-checkout` picks the next commit; the checkout is ours (`repository.py`), so that one which fails
can be skipped. What is known is read from refs/bisect, not from git's sentences.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.harness.bisect.repository import Repository
from surefoot.harness.git import GitError

GOOD, BAD, SKIP = "good", "bad", "skip"


@dataclass(frozen=True)
class Standing:
    """What is known now: the culprit, the next commit, or the candidates that nobody can tell apart."""

    candidates: tuple[str, ...]
    """Commits that may still be the culprit, newest first."""
    next: str | None
    """The commit to test; None when the search is over."""

    @property
    def culprit(self) -> str | None:
        """The first bad commit, when it is known."""
        return self.candidates[0] if len(self.candidates) == 1 else None


class Session:
    """One bisect in git's books."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    def open(self) -> None:
        """Open the books."""
        self.repository.git("bisect", "start", "--no-checkout")

    def mark(self, answer: str, commit: str) -> None:
        """Write down one answer. git's exit code also tells about the search, so the ref is what is checked."""
        said = self.repository.run("bisect", answer, commit)
        ref = f"refs/bisect/{BAD}" if answer == BAD else f"refs/bisect/{answer}-{commit}"
        if self.repository.commit(ref) != commit:
            words = " ".join((said.stderr or said.stdout).split())
            raise GitError(
                f"git bisect {answer} {commit[:12]} was refused: {words}", "git keeps the books", "see above"
            )

    def standing(self) -> Standing:
        """Where the search is."""
        refs = self.repository.git("for-each-ref", "--format=%(objectname) %(refname:lstrip=2)", "refs/bisect").split(
            "\n"
        )
        named = [line.split(" ", 1) for line in refs]
        bad = next(commit for commit, name in named if name == BAD)
        goods = [commit for commit, name in named if name.startswith(f"{GOOD}-")]
        skipped = {commit for commit, name in named if name.startswith(f"{SKIP}-")}
        candidates = tuple(self.repository.git("rev-list", bad, "--not", *goods).split())
        open_ones = [commit for commit in candidates if commit != bad and commit not in skipped]
        if not open_ones:
            return Standing(candidates, None)
        told = self.repository.commit("BISECT_HEAD")
        return Standing(candidates, told if told in open_ones else open_ones[len(open_ones) // 2])

    def log(self) -> str:
        """git's log; '--no-checkout' was ours, and without it the log suits a plain `git bisect replay` too."""
        return (self.repository.try_git("bisect", "log") or "").replace(" '--no-checkout'", "")

    def close(self, *, keep: bool) -> None:
        """Forget the books; or keep them, as an ordinary bisect that plain git can continue or reset."""
        if keep:
            self.repository.run("update-ref", "-d", "BISECT_HEAD")
        else:
            self.repository.run("bisect", "reset")
