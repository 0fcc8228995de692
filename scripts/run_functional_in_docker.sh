#!/usr/bin/env bash
# Run one functional script in a container: CONTAINER=IMAGE scripts/run_functional_in_docker.sh SCRIPT
set -eu
here=${BASH_SOURCE[0]%/*}
[ "$here" != "${BASH_SOURCE[0]}" ] || here=.
. "$here/with_python.sh"
with_python -m surefoot_harness.runners docker-functional "$root" "$@"
