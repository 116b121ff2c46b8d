#!/usr/bin/env bash
# Prepare Python, then run every step in a process of its own and tabulate them: ./run_all.sh --help.
set -u
unset CDPATH PYTHONSAFEPATH # with which Python finds no module of this folder

if [ -z "${BASH_VERSION:-}" ]; then echo "run_all.sh: error: start it with bash: ./run_all.sh" >&2; exit 2; fi
here="$(cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" >/dev/null && pwd)"
te_version=2.20.2
report_packages="numpy tabulate msgspec jinja2 matplotlib" # what `python -m report` imports

# A Python that Ctrl-C ends looks like one that lacks a package.
trap 'echo "run_all.sh: interrupted" >&2; exit 130' INT

fail() { echo "run_all.sh: error: $2" >&2; exit "$1"; }

tell() { echo "run_all.sh: $1" >&2; }

# An interpreter's own path: a shim chooses one by the folder.
path_of() { "$1" -I -c 'import sys; print(sys.executable)'; }

# Whether an interpreter has packages; nothing is imported, which takes seconds. In another folder than the user's, whose
# files would be found instead: a typing.py, for example.
has() { # interpreter, packages ...
  (cd / && "$1" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "${@:2}") >/dev/null 2>&1
}

fit() { [[ "$("$1" -c 'import sys; print(sys.version_info >= (3, 10))' 2>/dev/null)" == *True ]]; }

# Install pinned releases into a folder, without the container's PIP_CONSTRAINT, which may know other ones.
install_into() { # folder, interpreter, packages
  grep -E "^(${3// /|})==" "$here/requirements.txt" |
    (cd / && PIP_CONSTRAINT='' "$2" -m pip install --quiet --no-warn-conflicts --root-user-action=ignore --target "$1" -r /dev/stdin) >&2
}

# What the report needs goes into a folder of the project's own, and nothing into the user's Python. Rows get pynvml
# alone, which reads a GPU's clock. Without a package the records are kept.
add_packages() { # interpreter
  local python="$1" folder missing=""
  folder="$here/.packages/$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')"
  # shellcheck disable=SC2086
  has "$python" $report_packages || [ -e "$folder/report/msgspec" ] || missing=" $report_packages"
  has "$python" pynvml || [ -e "$folder/row/pynvml.py" ] || missing="$missing nvidia-ml-py"
  [ -n "$missing" ] || return 0
  if ! has "$python" pip; then
    tell "$python has no pip, so these are not installed:$missing. Rows are measured and kept, without a table"
    return
  fi
  tell "installing$missing into $folder, once (of the report about 180 MB). $python stays as it is"
  if [[ $missing == *msgspec* ]]; then
    install_into "$folder/report" "$python" "$report_packages" || tell "the report's packages did not install (see above)"
  fi
  if [[ $missing == *nvidia-ml-py* ]]; then
    install_into "$folder/row" "$python" nvidia-ml-py || tell "nvidia-ml-py did not install: no clock, no power"
  fi
}

# A folder that this script did not make is never changed. -I: nothing of the current folder is imported.
make_venv() {
  local mark="$here/.venv/.made-by-run_all"
  [ -e "$here/.venv" ] && [ ! -e "$mark" ] &&
    fail 1 ".venv is not run_all.sh's and lacks a package of requirements.txt: install them there, or move it away"
  { mkdir -p "$here/.venv" && touch "$mark"; } 2>/dev/null ||
    fail 1 "cannot write to $here: name a Python that has torch and numpy, PYTHON=... ./run_all.sh"
  tell "python3 has no PyTorch. Installing requirements.txt into $here/.venv (once; minutes and, with CUDA, gigabytes)"
  python3 -I -m venv "$here/.venv" >&2 || fail 1 "python3 -m venv failed (Debian, Ubuntu: apt-get install python3-venv)"
  "$here/.venv/bin/python" -m pip install --quiet -r "$here/requirements.txt" >&2 ||
    fail 1 "requirements.txt did not install (see above)"
  if [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; then
    # Optional: without it the FP8 step is a skipped row with its reason.
    tell "installing Transformer Engine $te_version into .venv, for step 4"
    # shellcheck disable=SC2015
    "$here/.venv/bin/python" -m pip install --quiet wheel==0.48.0 setuptools==80.9.0 ninja==1.13.2 >&2 &&
      "$here/.venv/bin/python" -m pip install --quiet --no-build-isolation \
        "transformer-engine[pytorch]==$te_version" >&2 ||
      tell "Transformer Engine did not install; the step that needs it will be skipped"
  fi
}

# Set `python`. A torch that is already there is never replaced: in NVIDIA's container it is NVIDIA's own.
setup() {
  if [ -n "${PYTHON:-}" ]; then
    command -v -- "$PYTHON" >/dev/null || fail 2 "PYTHON=$PYTHON does not run"
    fit "$PYTHON" || fail 2 "PYTHON=$PYTHON is older than Python 3.10, or does not run"
    PYTHON="$(path_of "$PYTHON")"
    has "$PYTHON" torch numpy || fail 2 "PYTHON=$PYTHON lacks torch or numpy: install them there, or leave PYTHON out"
    python="$PYTHON"
    return
  fi
  command -v python3 >/dev/null || fail 1 "there is no python3: install Python 3.10 or newer"
  fit python3 || fail 1 "python3 ($(python3 --version 2>&1 | head -1)) does not start or is older than Python 3.10"
  python="$(path_of python3)"
  if has "$python" torch; then
    has "$python" numpy || fail 1 "$python has torch, and no numpy: install it there"
    add_packages "$python"
    return
  fi
  python="$here/.venv/bin/python"
  # shellcheck disable=SC2086
  has "$python" torch pynvml $report_packages || make_venv
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
