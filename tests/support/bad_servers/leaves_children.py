"""Starts a daemon that holds all pipes, a child that becomes a zombie and one that ignores every signal; then answers."""

import os
import signal
import time

from base import echo, serve


def call(request):
    if os.fork() == 0:  # a daemon: another session, another parent
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)
        os._exit(0)
    if os.fork() == 0:
        os._exit(0)
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(3600)
    echo(request)


serve(call)
