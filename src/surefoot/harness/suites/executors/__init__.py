"""Where a recipe runs: one interface, `submit poll cancel fetch`, for local processes, Docker and Slurm.

Read next: `base.py`, then `local.py`, the default.
"""
