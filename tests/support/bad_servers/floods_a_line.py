"""Answers with a gigabyte without a newline."""

from base import serve, write


def call(request):
    write(b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "' % request["id"])
    for _ in range(1024):
        write(b"x" * 2**20)


serve(call)
