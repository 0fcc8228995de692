"""A small project on disk, and sessions told by hand: what ran, what was read."""

from __future__ import annotations

from project_folder import ProjectFolder

from surefoot.harness.affected.records import ObservedUse, ProjectView, load, save
from surefoot.harness.affected.remember import FinishedTest, OutsideTests, StateBuilder
from surefoot.harness.affected.select import Judge
from surefoot.harness.affected.tree import Tree

ENVIRONMENT = {"python": "3.11.0", "distributions": "x"}


class Project(ProjectFolder):
    """A project folder with its state file."""

    def judge(self, environment: dict[str, str] | None = None) -> Judge:
        state, notice = load(self.root)
        assert notice is None
        view = ProjectView(Tree(self.root, state.known()), state.roots, state.edges)
        return Judge(state, view, environment or ENVIRONMENT)

    def session(self, outside: OutsideTests | None = None, gone: tuple[str, ...] = (), **tests: FinishedTest) -> None:
        """Remember a session in which `tests` ran."""
        judge = self.judge()
        memory = StateBuilder(judge.state, judge.view, ENVIRONMENT, outside or OutsideTests(started=2e9 * 10))
        save(self.root, memory.learn(tests, judge, gone))

    def chosen(self, environment: dict[str, str] | None = None) -> set[str]:
        judge = self.judge(environment)
        return {test for test in judge.state.tests if judge.is_affected(test)}


def ran(
    path: str, *blocks: str, reads: tuple[str, ...] = (), outcome: str = "passed", loaded: str = "", **more: object
) -> FinishedTest:
    """A test in `path` that ran `blocks`, each as "file::name"."""
    evidence = ObservedUse(
        blocks={(each.partition("::")[0], each.partition("::")[2]) for each in blocks},
        loaded={loaded} if loaded else set(),
        reads={each: set() for each in reads},
    )
    for name, value in more.items():
        setattr(evidence, name, value)
    return FinishedTest(outcome, path, evidence=evidence)
