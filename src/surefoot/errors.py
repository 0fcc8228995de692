"""The very module `surefoot_harness.errors`, by its name in the trainer."""

import sys

from surefoot import pairing  # before anything of the harness is loaded

pairing.require()

import surefoot_harness.errors  # noqa: E402
from surefoot_harness.errors import *  # noqa: E402

sys.modules[__name__] = surefoot_harness.errors
