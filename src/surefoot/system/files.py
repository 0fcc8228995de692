"""The very module `surefoot_harness.system.files`, by its name in the trainer."""

import sys

import surefoot_harness.system.files
from surefoot_harness.system.files import *

sys.modules[__name__] = surefoot_harness.system.files
