# Read by the scripts beside it, which set `here`: `root`, the tree they belong to, and `with_python`, which runs surefoot from it.
root=$(cd "$here/.." && pwd -P)
with_python() {
  python=$(command -v python3 || command -v python) || { echo "python3 is not on PATH; fix: install it" >&2; exit 2; }
  export PYTHONPATH="$root/src:$root/harness/src${PYTHONPATH:+:$PYTHONPATH}"
  exec "$python" "$@"
}
