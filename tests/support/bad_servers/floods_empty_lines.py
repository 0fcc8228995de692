"""Nothing, a million times."""

from base import serve, write


def call(request):
    for _ in range(1000):
        write(b"\n" * 10_000)


serve(call)
