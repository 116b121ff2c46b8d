#!/usr/bin/env bash
# Make all that documents show from the records again: reports under docs/results/, and the tables of README and docs/*.md.
# docs/renew.sh --check only tells whether a table is stale. PYTHON names a Python with the packages of requirements.txt
# and cogapp.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
[[ $# == 0 || $* == --check ]] || { echo "docs/renew.sh: error: it takes --check or nothing" >&2 && exit 2; }
options=(-P -U -I docs -p "import tables as t") # so that a block is one call: print(t.ladder("h200/gpt2"))
if [ "${1:-}" = --check ]; then
  exec "$python" -m cogapp --check "${options[@]}" README.md docs/*.md
fi
"$python" docs/tables.py
exec "$python" -m cogapp -r "${options[@]}" README.md docs/*.md
