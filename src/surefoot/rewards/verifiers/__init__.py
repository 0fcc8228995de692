"""Verifiers: what counts as right, by kind of task; and the probing of rewards."""
