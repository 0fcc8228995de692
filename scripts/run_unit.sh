#!/usr/bin/env bash
# Run the unit tests: scripts/run_unit.sh [PATH below tests/unit] [pytest options]
set -eu
here=${BASH_SOURCE[0]%/*}
[ "$here" != "${BASH_SOURCE[0]}" ] || here=.
root=$(cd "$here/.." && pwd -P)
python=$(command -v python3 || command -v python) || { echo "python3 is not on PATH; fix: install it" >&2; exit 2; }
export PYTHONPATH="$root/src:$root/harness/src${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m surefoot_harness.runners unit "$root" "$@"
