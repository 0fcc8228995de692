"""`python -m surefoot.sandbox`: what this host can contain."""

import sys

from surefoot.sandbox.sandbox import available

if __name__ == "__main__":
    print(available())
    sys.exit(0 if available().usable else 5)
