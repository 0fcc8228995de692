"""Which task next: loading, holding out, dealing. Read `sources.py` first, then `tasks.py`."""
