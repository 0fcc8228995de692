#!/usr/bin/env bash
# Run the unit tests in a container: CONTAINER=IMAGE scripts/run_unit_in_docker.sh [arguments of run_unit.sh]
set -eu
here=${BASH_SOURCE[0]%/*}
[ "$here" != "${BASH_SOURCE[0]}" ] || here=.
. "$here/with_python.sh"
with_python -m surefoot_harness.runners docker-unit "$root" "$@"
