"""Reports progress and never finishes."""

import time

from base import send, serve


def call(request):
    done = 0
    while True:
        done += 1
        send({"method": "notifications/progress", "params": {"progressToken": request["id"], "progress": done}})
        time.sleep(0.02)


serve(call)
