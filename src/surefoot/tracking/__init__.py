"""Every number, once: the register of metrics, the log, and what a person sees.

Read next: `metrics.py`, the numbers; `live.py`, what is seen meanwhile.
"""
