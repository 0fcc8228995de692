"""The very module `surefoot_harness.system.user_code`, by its name in the trainer."""

import sys

import surefoot_harness.system.user_code
from surefoot_harness.system.user_code import *

sys.modules[__name__] = surefoot_harness.system.user_code
