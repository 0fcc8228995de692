#!/usr/bin/env bash
# Run the unit tests: scripts/run_unit.sh [PATH below tests/unit] [pytest options]
set -eu
here=${BASH_SOURCE[0]%/*}
[ "$here" != "${BASH_SOURCE[0]}" ] || here=.
. "$here/with_python.sh"
with_python -m surefoot_harness.runners unit "$root" "$@"
