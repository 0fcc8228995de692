"""The very module `surefoot_harness.system.deadline`, by its name in the trainer."""

import sys

import surefoot_harness.system.deadline
from surefoot_harness.system.deadline import *

sys.modules[__name__] = surefoot_harness.system.deadline
