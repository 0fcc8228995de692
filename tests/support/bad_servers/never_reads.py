"""Lists its tools and stops reading."""

import time

from base import serve


def stop_reading():
    while True:
        time.sleep(3600)


serve(after_list=stop_reading)
