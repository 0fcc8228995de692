"""Kills the process that started it, in the middle of a call."""

import os
import signal
import time

from base import serve


def call(request):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


serve(call)
