"""What the rest of the package asks of the operating system: files, processes, signals, memory, text.

Each module here is one of `surefoot_harness.system`, the very same object. This package is one of its own: with that
one's `__path__` Python would load every file a second time.
"""

from surefoot import pairing

pairing.require()  # before anything of the harness is loaded
