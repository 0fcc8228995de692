"""The very module `surefoot_harness.system.environment`, by its name in the trainer."""

import sys

import surefoot_harness.system.environment
from surefoot_harness.system.environment import *

sys.modules[__name__] = surefoot_harness.system.environment
