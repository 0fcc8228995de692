"""The very module `surefoot_harness.system.text`, by its name in the trainer."""

import sys

import surefoot_harness.system.text
from surefoot_harness.system.text import *

sys.modules[__name__] = surefoot_harness.system.text
