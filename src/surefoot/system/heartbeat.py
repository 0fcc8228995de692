"""The very module `surefoot_harness.system.heartbeat`, by its name in the trainer."""

import sys

import surefoot_harness.system.heartbeat
from surefoot_harness.system.heartbeat import *

sys.modules[__name__] = surefoot_harness.system.heartbeat
