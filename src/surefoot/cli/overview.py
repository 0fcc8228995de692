"""The headings of `surefoot --help`: the trainer's commands, and the harness's among them."""

from __future__ import annotations

from surefoot_harness.cli.overview import JUDGING, OTHERS, Overview, WholeLines

__all__ = ["HEADINGS", "OTHERS", "TrainerOverview", "WholeLines"]

HEADINGS = {
    "Train": {
        "train": "Train a model by CONFIG; without one, the built-in run.",
        "config": "Print every key and what it does, or a config resolved.",
        "tools": "Start tool servers, list their tools, and call one.",
        "probe-reward": "Ask a reward about answers whose worth is known.",
        "bench": "Measure how fast a config is here, and what bounds it.",
        "memory": "Say what a config takes, and what goes on which GPU.",
        "demo": "Small runs in which something goes wrong, and what stops it.",
    },
    "Look at a run": {
        "status": "Say how a run stands: running, silent, stopped or over.",
        "report": "Write one page about a run: verdict, curves, rollouts.",
        "eval": "Answer tasks with a run's weights or a model's, and count.",
        "export": "Write a run's adapter, or its model with it merged in.",
        "ledger": "Account for every planned task of a run.",
    },
    **JUDGING,
    "About": {
        "version": "Print the version; so does surefoot --version.",
    },
}


class TrainerOverview(Overview):
    """The command itself: a list under each heading."""

    headings = HEADINGS
