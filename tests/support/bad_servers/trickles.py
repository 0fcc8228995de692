"""Answers one byte at a time, and never to the end."""

import time

from base import serve, write


def call(request):
    write(b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "' % request["id"])
    while True:
        write(b"x")
        time.sleep(0.01)


serve(call)
