"""The very module `surefoot_harness.system.git`, by its name in the trainer."""

import sys

import surefoot_harness.system.git
from surefoot_harness.system.git import *

sys.modules[__name__] = surefoot_harness.system.git
