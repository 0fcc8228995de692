"""The very module `surefoot_harness.system.signals`, by its name in the trainer."""

import sys

import surefoot_harness.system.signals
from surefoot_harness.system.signals import *

sys.modules[__name__] = surefoot_harness.system.signals
