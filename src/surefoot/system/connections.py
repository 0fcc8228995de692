"""The very module `surefoot_harness.system.connections`, by its name in the trainer."""

import sys

import surefoot_harness.system.connections
from surefoot_harness.system.connections import *

sys.modules[__name__] = surefoot_harness.system.connections
