"""The very module `surefoot_harness.system.hashing`, by its name in the trainer."""

import sys

import surefoot_harness.system.hashing
from surefoot_harness.system.hashing import *

sys.modules[__name__] = surefoot_harness.system.hashing
