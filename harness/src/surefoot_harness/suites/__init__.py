"""Suites: which recipes to train, where, for how long, and by which checks they are judged.

Owns       suite manifests (`suites/NAME.toml`), code snapshots, executors, `verdict.json` of a recipe, result folders.
Promises   a recipe is PASS only when its trainer ended well, reached its last step and every check passed; what
           decides is `verdict.json`, never a word in a log.
Never      imports the trainer: it is a command like any other.

    NAME.toml --manifest--> Suite --plan--> Trial (recipe x seed) --executors--> run folder --judge--> verdict.json

Read next: `manifest.py`, then `run.py`.
"""
