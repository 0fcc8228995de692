"""The very module `surefoot_harness.system.memory`, by its name in the trainer."""

import sys

import surefoot_harness.system.memory
from surefoot_harness.system.memory import *

sys.modules[__name__] = surefoot_harness.system.memory
