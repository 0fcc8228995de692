# What every functional test begins with. Sourced: sets root, name, folder and run, and the trainer's output goes to run.log.
#
#   FOLDER = runs/functional/NAME, or $FUNCTIONAL_OUT/NAME; recreated each time
#     run.log        what the trainer said
#     run/           the run folder
#     metrics.json   its event logs as metric, step, value
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
name=$(basename "$0" .sh)
folder=${FUNCTIONAL_OUT:-$root/runs/functional}/$name
run=$folder/run
command -v surefoot >/dev/null || PATH="$root/.venv/bin:$PATH"
rm -rf "$folder"
mkdir -p "$folder"

train() { # surefoot train WORDS, seen and kept; a later KEY=VALUE replaces an earlier one, so that the caller's win
    local -A last=()
    local -a order=() words=()
    local word key
    for word in "$@"; do
        key=${word%%=*}
        [ -n "${last[$key]+there}" ] || order+=("$key")
        last[$key]=$word
    done
    for key in "${order[@]}"; do words+=("${last[$key]}"); done
    surefoot train "${words[@]}" 2>&1 | tee -a "$folder/run.log" # one that fails ends the test here, before any check
}

judge() { # the events as one JSON file, then the table of checks, whose verdict is the test's
    surefoot dump "$run" -o "$folder/metrics.json" >>"$folder/run.log"
    surefoot check "$folder/metrics.json" "$@"
}
