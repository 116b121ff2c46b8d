#!/usr/bin/env bash
# Prepare Python, then run every step in a process of its own and tabulate them: ./run_all.sh --help.
set -u
unset CDPATH

here="$(cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" >/dev/null && pwd)"
te_version=2.20.2

# A Python that Ctrl-C ends looks like one that lacks a package.
trap 'echo "run_all.sh: interrupted" >&2; exit 130' INT

fail() { echo "run_all.sh: error: $2" >&2; exit "$1"; }

# What keeps an interpreter from importing packages, as its last line: `lacks PYTHON "torch, numpy"`. In another folder
# than the user's, whose files would be imported instead: a typing.py, for example.
lacks() { (cd / && "$1" -c "import $2" 2>&1 >/dev/null | tail -1); }

has() { (cd / && "$1" -c "import $2") >/dev/null 2>&1; }

fit() { [[ "$("$1" -c 'import sys; print(sys.version_info >= (3, 10))' 2>/dev/null)" == *True ]]; }

# Install the pinned release of a package, without the container's PIP_CONSTRAINT, which may know another one.
add() { # interpreter, package, options of pip
  grep "^$2" "$here/requirements.txt" | (cd / && PIP_CONSTRAINT='' "$1" -m pip install --quiet "${@:3}" -r /dev/stdin) >&2
}

# What the report needs beside torch. Without it the records are kept, and one line says which package is missing.
add_report_packages() { # interpreter
  for package in tabulate msgspec nvidia-ml-py jinja2 matplotlib; do
    module=${package/nvidia-ml-py/pynvml}
    has "$1" "$module" || add "$1" "$package" || echo "run_all.sh: $package did not install" >&2
  done
}

# A folder that this script did not make is never changed. -I: nothing of the current folder is imported.
make_venv() {
  local mark="$here/.venv/.made-by-run_all"
  [ -e "$here/.venv" ] && [ ! -e "$mark" ] &&
    fail 1 ".venv is not run_all.sh's and lacks a package of requirements.txt: install them there, or move it away"
  { mkdir -p "$here/.venv" && touch "$mark"; } 2>/dev/null ||
    fail 1 "cannot write to $here: name a Python that has torch and numpy, PYTHON=... ./run_all.sh"
  echo "run_all.sh: installing requirements.txt into .venv (once)" >&2
  python3 -I -m venv "$here/.venv" >&2 || fail 1 "python3 -m venv failed (Debian, Ubuntu: apt-get install python3-venv)"
  "$here/.venv/bin/python" -m pip install --quiet -r "$here/requirements.txt" >&2 ||
    fail 1 "requirements.txt did not install (see above)"
  if [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; then
    # Optional: without it the FP8 step is a skipped row with its reason.
    "$here/.venv/bin/python" -m pip install --quiet wheel==0.48.0 setuptools==80.9.0 ninja==1.13.2 >&2 &&
      "$here/.venv/bin/python" -m pip install --quiet --no-build-isolation \
        "transformer-engine[pytorch]==$te_version" >&2 ||
      echo "run_all.sh: Transformer Engine did not install; the step that needs it will be skipped" >&2
  fi
}

# Set `python`. A torch that is already there is never replaced: in NVIDIA's container it is NVIDIA's own.
setup() {
  if [ -n "${PYTHON:-}" ]; then
    command -v -- "$PYTHON" >/dev/null || fail 2 "PYTHON=$PYTHON does not run"
    fit "$PYTHON" || fail 2 "PYTHON=$PYTHON is older than Python 3.10, or does not run"
    [[ $PYTHON != */* || $PYTHON == /* ]] || PYTHON="$PWD/$PYTHON"
    has "$PYTHON" "torch, numpy" ||
      fail 2 "PYTHON=$PYTHON lacks torch or numpy, or cannot import them: $(lacks "$PYTHON" "torch, numpy")"
    python="$PYTHON"
    return
  fi
  command -v python3 >/dev/null || fail 1 "there is no python3: install Python 3.10 or newer"
  fit python3 || fail 1 "python3 ($(python3 --version 2>&1 | head -1)) does not start or is older than Python 3.10"
  if has python3 torch; then
    has python3 numpy || add python3 numpy --no-deps || fail 1 "numpy did not install (see above)"
    add_report_packages python3
    python=python3
    return
  fi
  python="$here/.venv/bin/python"
  has "$python" "torch, numpy, tabulate, msgspec, pynvml, jinja2, matplotlib" || make_venv
}

case " $* " in *" --help "* | *" -h "*) # needs no torch
  fit "${PYTHON:-python3}" || fail 1 "${PYTHON:-python3} does not start or is older than Python 3.10"
  exec "${PYTHON:-python3}" "$here/ladder/__main__.py" --help
  ;;
esac
[[ ${1:-} != --setup || $# == 1 ]] || fail 2 "--setup takes no other argument: $2"
setup
if [ "${1:-}" = --setup ]; then
  echo "$python"
  exit 0
fi
exec "$python" "$here/ladder/__main__.py" "$@"
