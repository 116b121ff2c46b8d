#!/usr/bin/env bash
# Run all tests, or with --fast those that take seconds; install what is missing first. Other arguments go to pytest.
set -eu
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="$(./run_all.sh --setup)"
if ! "$python" -c "import pytest, xdist" 2>/dev/null; then
  echo "tests/run.sh: installing tests/requirements.txt (once)"
  "$python" -m pip install --quiet -r tests/requirements.txt
fi
workers=2 # a GPU takes one test at a time
[ -e /dev/nvidiactl ] && workers=0
if [ "${1:-}" = --fast ]; then
  shift
  set -- -m "not slow" "$@"
fi
exec "$python" -m pytest -q -rfEs -n "$workers" --dist worksteal --durations=10 "$@"
