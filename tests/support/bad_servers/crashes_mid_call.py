"""Dies in the middle of a call; writes down that it was asked, when it is told where."""

import os
import sys

from base import serve


def call(request):
    if len(sys.argv) > 1:
        with open(sys.argv[1], "a") as file:
            file.write("asked\n")
    sys.stderr.write("segmentation fault, or so\n")
    sys.stderr.flush()
    os._exit(11)


serve(call)
