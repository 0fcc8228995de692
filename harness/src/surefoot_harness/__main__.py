"""`python -m surefoot_harness` is `surefoot-harness`."""

from surefoot_harness.cli import main

if __name__ == "__main__":
    main()
