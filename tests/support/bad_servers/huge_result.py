"""A valid answer of fifty megabytes."""

from base import serve, write


def call(request):
    write(b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "' % request["id"])
    for _ in range(50):
        write(b"z" * 2**20)
    write(b'"}]}}\n')


serve(call)
