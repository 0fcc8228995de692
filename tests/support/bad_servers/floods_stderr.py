"""Writes twenty megabytes to standard error before it answers."""

import sys

from base import echo, serve


def call(request):
    for _ in range(20):
        sys.stderr.write("y" * 2**20)
    echo(request)


serve(call)
