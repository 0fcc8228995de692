"""The very module `surefoot_harness.system.process`, by its name in the trainer."""

import sys

import surefoot_harness.system.process
from surefoot_harness.system.process import *

sys.modules[__name__] = surefoot_harness.system.process
