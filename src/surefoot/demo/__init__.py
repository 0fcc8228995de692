"""Failures, caught on stage: small runs in which something goes wrong, with and without what stops it.

Read next: `hack.py`, a reward that is gamed; `grader.py`, the mistake that makes it possible.
"""
