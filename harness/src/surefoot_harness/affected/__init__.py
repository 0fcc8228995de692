"""Only the tests whose outcome could have changed: `pytest --affected`.

Owns       the record of what each test ran and read, in this process and in every process it started.
Promises   a test is left out only when everything it depends on is known and unchanged, byte for byte; what is not
           known runs, and says why.
Never      trusts a file time, follows only one level of imports, or stores a test that did not end well.

    pytest ── hooks.py ── recorder (this process, children, Ray workers) ── store.py ── .surefoot/affected.json
                 └── select.py ◀── tree.py ◀── blocks.py, graph.py (what the files say now)

Read next: `select.py`, the rules by which a test is chosen.
"""
