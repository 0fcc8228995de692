"""Answers, and then ignores both the end of its input and SIGTERM."""

import signal
import time

from base import serve

signal.signal(signal.SIGTERM, signal.SIG_IGN)
serve()
while True:
    time.sleep(3600)
