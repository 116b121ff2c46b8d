#!/usr/bin/env bash
# Run all tests; install what is missing first. Arguments go to pytest: ./tests/run.sh -k causal
set -eu
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="$(./run_all.sh --setup)"
if ! "$python" -c "import pytest, xdist" 2>/dev/null; then
  "$python" -m pip install --quiet -r tests/requirements.txt
fi
workers=2 # a GPU takes one test at a time
[ -e /dev/nvidiactl ] && workers=0
exec "$python" -m pytest -q -rs -n "$workers" --dist worksteal "$@"
