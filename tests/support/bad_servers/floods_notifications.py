"""A million messages that nobody asked for."""

from base import serve, write

LINE = b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "hello"}}\n'


def call(request):
    for _ in range(10_000):
        write(LINE * 100)


serve(call)
