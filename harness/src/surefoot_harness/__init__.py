"""Judge runs from their logs: checks, tracked metrics, affected tests, bisect, suites.

Owns       everything that looks at a run from outside: ours, TRL's or a stranger's.
Promises   missing, empty or non-finite evidence is never a PASS; nothing here imports torch or the trainer.
Never      evaluates text as Python, searches a log for the word FAIL, or leaves a repository changed.

A distribution of its own, `surefoot-harness`, and a part of the trainer's wheel. It imports nothing of `surefoot`.
"""

__version__ = "0.1.0"
