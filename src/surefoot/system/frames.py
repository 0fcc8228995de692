"""The very module `surefoot_harness.system.frames`, by its name in the trainer."""

import sys

import surefoot_harness.system.frames
from surefoot_harness.system.frames import *

sys.modules[__name__] = surefoot_harness.system.frames
