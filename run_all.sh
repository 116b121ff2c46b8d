#!/usr/bin/env bash
# Run every step in a process of its own and tabulate them. See usage below, or ./run_all.sh --help.
set -u

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
limit="${STEP_TIMEOUT:-1800}"
te_version=2.20.2

usage() {
  cat <<EOF
usage: ./run_all.sh [--peers] [--no-roofs] [--no-profile] [ARGUMENT ...]

Runs every [0-9]_*.py in order with the ARGUMENTs (python 0_baseline.py --help lists them), measures the
machine's roofs, prints a table and writes it, the records, traces and logs to a new folder under results/;
results/latest names it.
Exit code: 0 when every row is ok or skipped, 2 for bad arguments, 130 after Ctrl-C, 1 otherwise.

  --peers                  also run peers/*.py, on the same workload
  --no-roofs               do not measure copy bandwidth and matrix products of this machine
  --no-profile             do not profile steps after the timed ones
  ./run_all.sh --setup     only prepare Python, and print the interpreter that will be used
  STEP_TIMEOUT=SECONDS     the longest one step may take (now $limit)
  PYTHON=INTERPRETER       use this Python as it is
EOF
}

has() { "$1" -c "import $2" >/dev/null 2>&1; }

# Install the pinned release of a package, without the container's PIP_CONSTRAINT, which may know another one.
add() { # package, options of pip
  grep "^$1" "$here/requirements.txt" | PIP_CONSTRAINT='' python3 -m pip install --quiet "${@:2}" -r /dev/stdin >&2
}

# Print the interpreter to use. A torch that is already there is never replaced: in NVIDIA's
# container it is NVIDIA's own. Elsewhere .venv gets the pinned requirements.
setup() {
  if [ -n "${PYTHON:-}" ]; then
    echo "$PYTHON"
    return
  fi
  if has python3 torch; then
    for package in numpy tabulate; do
      has python3 "$package" || add "$package" --no-deps || return 1
    done
    for package in jinja2 matplotlib; do # without them the table stands, and the page is missing
      has python3 "$package" || add "$package" || echo "run_all.sh: $package did not install; no report.html" >&2
    done
    echo python3
    return
  fi
  local python="$here/.venv/bin/python"
  if ! has "$python" "torch, numpy, tabulate, jinja2, matplotlib"; then
    echo "run_all.sh: installing requirements.txt into .venv (once)" >&2
    if [ ! -x "$python" ]; then # never over one that exists: pip repairs what it lacks
      python3 -m venv "$here/.venv" >&2 || return 1
    fi
    "$python" -m pip install --quiet -r "$here/requirements.txt" >&2 || return 1
    if command -v nvidia-smi >/dev/null; then
      # Optional: without it the FP8 step is a skipped row that says so.
      "$python" -m pip install --quiet wheel setuptools ninja >&2 &&
        "$python" -m pip install --quiet --no-build-isolation "transformer-engine[pytorch]==$te_version" >&2 ||
        echo "run_all.sh: Transformer Engine did not install; the step that needs it will be skipped" >&2
    fi
  fi
  echo "$python"
}

# Say how a process ended that left no record, for the report: STATUS REASON.
how_it_ended() { # exit code, seconds it took, log
  if [ "$1" -eq 124 ] || { [ "$1" -eq 137 ] && [ "$2" -ge "$limit" ]; }; then
    echo "timeout took longer than $limit s: raise STEP_TIMEOUT, or take fewer --steps"
  elif [ "$1" -eq 137 ]; then
    echo "oom killed by the system (signal 9), as it does when host memory runs out"
  elif [ "$1" -gt 128 ]; then
    echo "failed killed by signal $(($1 - 128)): see ${3#"$run"/}"
  else
    echo "failed ended with exit code $1 and no record: see ${3#"$run"/}"
  fi
}

# Run a command under the time limit, appending to a log; sets `code`. In the background, so that Ctrl-C
# reaches the trap at once; timeout ends the whole process group.
run_limited() { # log, command ...
  local log=$1 pid
  shift
  # shellcheck disable=SC2094 # both streams append to the log
  timeout --kill-after=10 "$limit" "$@" > >(tee -a "$log") 2>>"$log" </dev/null &
  pid=$!
  trap 'interrupted=1; kill -TERM "$pid" 2>/dev/null' INT TERM
  { wait "$pid"; } 2>/dev/null # bash's own word on a killed process; the report has one
  code=$?
  if [ "$interrupted" -eq 1 ]; then
    wait "$pid" 2>/dev/null # the first wait ended with the signal, not with the process
  fi
  trap 'interrupted=1' INT TERM
}

run_step() { # script; peers/x.py leaves its record in the folder peers/
  local name record log started
  name="${1#"$here"/}"
  name="${name%.py}"
  record="$run/$name.json"
  log="$run/$name.log"
  started=$SECONDS
  run_limited "$log" "$python" "$1" "${arguments[@]}" --output "$record"
  if [ ! -e "$record" ]; then
    if [ "$interrupted" -eq 1 ]; then
      echo "failed interrupted" >"$run/$name.exit"
    else
      how_it_ended "$code" $((SECONDS - started)) "$log" >"$run/$name.exit"
    fi
    echo "$name: $(<"$run/$name.exit")"
  fi
}

case " $* " in
  *" --help "* | *" -h "*) usage; exit 0 ;;
  *" --output"*) echo "run_all.sh: error: --output is chosen by run_all.sh: results/ holds a folder per run" >&2; exit 2 ;;
esac
case "$limit" in
  '' | *[!0-9]* | 0*) echo "run_all.sh: error: STEP_TIMEOUT=$limit is not a whole number of seconds" >&2; exit 2 ;;
esac
if [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" -c 'import torch, numpy, tabulate; print("runs")' 2>/dev/null)" != runs ]; then
  echo "run_all.sh: error: PYTHON=$PYTHON does not run, or lacks torch, numpy or tabulate" >&2
  exit 2
fi
python="$(setup)" || { echo "run_all.sh: error: could not prepare Python (see above)" >&2; exit 1; }
if [ "${1:-}" = --setup ]; then
  echo "$python"
  exit 0
fi
peers=0 roofs=1 profile=1 arguments=()
for word in "$@"; do
  case "$word" in
    --peers) peers=1 ;;
    --no-roofs) roofs=0 ;;
    --no-profile) profile=0 ;;
    --profile) ;; # what happens anyway
    *) arguments+=("$word") ;;
  esac
done
[ "$profile" -eq 0 ] || arguments+=(--profile)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 # a folder named common where the user stands is not ours

trap 'echo "run_all.sh: interrupted" >&2; exit 130' INT TERM
# Check the arguments once, and pin what `auto` chose, so that all rows do the same work.
resolved="$("$python" -m common.benchmark "${arguments[@]}")" || exit $?
while read -r word; do
  [ -z "$word" ] || arguments+=("$word")
done <<<"$resolved"

if ! { mkdir -p "$here/results" && run="$(mktemp -d "$here/results/$(date -u +%Y%m%d-%H%M%S)-XXXX")"; }; then
  echo "run_all.sh: error: cannot write to results/" >&2
  exit 2
fi
chmod 755 "$run"
if [ -d "$here/results/latest" ] && [ ! -L "$here/results/latest" ]; then
  echo "run_all.sh: results/latest is a folder of your own and stays: this run is $run" >&2
else
  ln -sfn "$(basename "$run")" "$here/results/latest"
fi
printf '%q ' ./run_all.sh "$@" >"$run/command"

run_or_skip() { # script
  local name="${1#"$here"/}"
  if [ "$interrupted" -eq 1 ]; then
    echo "failed not run: interrupted" >"$run/${name%.py}.exit"
  else
    run_step "$1"
    echo
  fi
}

measure_roofs() {
  local said
  echo "measuring the roofs of this machine"
  run_limited "$run/roofs.log" "$python" -m common.hardware "${arguments[@]}" --output "$run/roofs.json"
  [ "$code" -ne 0 ] || return 0
  said="$(tail -n 1 "$run/roofs.log" | cut -c1-200)"
  [ "$code" -ne 124 ] || said="took longer than $limit s"
  [ "$interrupted" -eq 0 ] || said="interrupted"
  echo "the roofs could not be measured: $said" | tee "$run/roofs.failed"
}

interrupted=0
trap 'interrupted=1' INT TERM
for index in 0 1 2 3 4 5 6 7 8 9; do
  found=0
  for script in "$here/${index}"_*.py; do
    [ -e "$script" ] || continue
    found=1
    run_or_skip "$script"
  done
  if [ "$found" -eq 0 ] && [ "$index" -le 4 ]; then
    echo "failed ${index}_*.py is missing: restore it with git checkout" >"$run/${index}_missing.exit"
  fi
done

if [ "$peers" -eq 1 ]; then
  mkdir "$run/peers"
  for script in "$here"/peers/*.py; do
    [ -e "$script" ] || continue
    run_or_skip "$script"
  done
fi
[ "$roofs" -eq 0 ] || [ "$interrupted" -eq 1 ] || measure_roofs

"$python" -m common.report "$run"
code=$?
echo "written to results/$(basename "$run")"
[ "$interrupted" -eq 0 ] || exit 130
exit "$code"
