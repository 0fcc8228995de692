"""Says why on standard error, and is gone before the handshake."""

import sys

sys.stderr.write("cannot find my licence file\n")
sys.exit(3)
