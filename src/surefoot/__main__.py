"""`python -m surefoot` is `surefoot`: a refusal instead of a traceback where the installation is mixed up."""

import sys

from surefoot.pairing import PairingError


def main() -> None:
    """Entry point of the `surefoot` command."""
    try:
        from surefoot.cli import main as command
    except PairingError as error:
        print(f"PairingError: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    command()


if __name__ == "__main__":
    main()
