"""Numbers that tests record: one `Tracker` per test, journals while they run, one results file per session.

Read next: `tracker.py`, what a test calls; `tracker.py`, why a crash loses nothing; `results.py`, the files.
"""
