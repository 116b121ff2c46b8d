#!/usr/bin/env bash
# Record a machine under docs/results/MACHINE:
#
#   docs/record.sh MACHINE           every piece that is missing or of other code: a quarter of an hour each, parity forty minutes
#   docs/record.sh MACHINE NAME ...  these pieces, for example: gpt2 parity
#   docs/record.sh --check           the records of other code than the present one
#   docs/record.sh --confirm MACHINE one pass of the slice and of gpt2 with their peers, compared with the records
#
# Nothing is recorded from uncommitted files, documents aside: a record names its commit. A piece that was interrupted
# goes on with the same command, until its record lies under docs/results. The Python needs cogapp too
# (tests/requirements.txt). Where the system has another cuDNN than PyTorch's, name PyTorch's in CUDNN_HOME, and put its
# lib/ first on LD_LIBRARY_PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "docs/record.sh: error: $1" >&2 && exit 2; }
machine="${1:-}"
[[ $machine == -h || $machine == --help ]] && sed -n '2,/^$/s/^# \?//p; /^set/q' docs/record.sh && exit
[[ $machine == --check || $machine == --confirm || $machine =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
  fail "give a MACHINE, for example: docs/record.sh h200"
python="${PYTHON:-$(./run_all.sh --setup)}"
[ "$machine" = --check ] && exec "$python" docs/tables.py --stale "${@:2}"
changed="$(git status --porcelain -- . ':!docs/*.md' ':!docs/index.html' ':!docs/results' ':!README.md')" # renewed here
[ -z "$changed" ] || fail "commit first, a record names its commit: $(head -1 <<<"$changed")"

# What is made lies under results/ until it is whole: a record names its commit, without changes of files under docs/.
keep() { # where it lies, and its folder under docs/results: docs/renew.sh makes the rest from the merged record
  [[ -e $1/results.json || ! -e $1/plan.json ]] || fail "$1 has no results.json: python -m report $1 makes it"
  mkdir -p "$2"
  if [ -e "$1/results.json" ]; then cp "$1/results.json" "$2/"; else cp "$1"/*.* "$2/"; fi # roofs, anatomy
  rm -rf "$1"
}
ladder() { ./run_all.sh "$@" --output "$at" || (($? == 1)); } # a row that does not fit is a result
study() { "$python" -m "ladder.$1" "${@:2}" --output "$at" || (($? == 1)); }

if [ "$machine" = --confirm ]; then
  machine="${2:-}" failed=0
  [[ $# == 2 && -d docs/results/$machine/gpt2 ]] || fail "--confirm takes one MACHINE that has records, for example: h200"
  told="$("$python" docs/tables.py --device "$machine")" || fail "$told"
  names=()
  for name in gpt3-6.7b-slice gpt2; do [ ! -d "docs/results/$machine/$name" ] || names+=("$name"); done
  for name in "${names[@]}"; do # all runs before any is stored: interrupted, the same command goes on
    at="results/$machine-$name-confirmation"
    ladder --preset "$name" --no-roofs --peers
  done
  for name in "${names[@]}"; do
    to="docs/results/$machine/$name-confirmation" at="results/$machine-$name-confirmation"
    rm -rf "$to" # it told of another run
    if "$python" -m report --compare "docs/results/$machine/$name" "$at" --bound 0.03; then keep "$at" "$to"; else failed=1 && rm -rf "$at"; fi
  done
  PYTHON="$python" docs/renew.sh # documents tell what is confirmed
  exit "$failed"
fi
shift
most="roofs gpt3-6.7b-slice gpt2 parity parity-2048 parity-decaying parity-byte-pairs gpt2-batch-8 gpt2-batch-4 gpt2-50257 gpt3-xl wide-8192 narrow-320 sweep"
most+=" ablations ablations-fp32 ablations-fp8 ablations-gpt2 anatomy gradients llama hugging-face-gpt2 guide"
known=" $most gpt3-6.7b-slice-minute gpt3-6.7b-slice-batch-4 scaling scaling-batch-4 tiny "
names=("$@")
(($#)) || read -ra names <<<"$most"
for name in "${names[@]}"; do
  [[ $name == [a-z]* && $name != *" "* && $known == *" $name "* ]] || fail "no piece is named '$name'"
done
told="$("$python" docs/tables.py --device "$machine")" || fail "$told"
learning() { study parity --preset gpt2 --batch-size 8 "$@"; }
recipes=(3 4 bf16-head current-scaling-bf16-head) # docs/parity.md has the rule of these studies

mkdir -p results
for name in "${names[@]}"; do
  "$python" docs/tables.py --stale "$machine/$name" >/dev/null && continue
  to="docs/results/$machine/$name" at="results/$machine-$name"
  mkdir -p "$at"
  case "$name" in
    roofs) "$python" -m predict.roofs --preset gpt3-6.7b-slice --output "$at/roofs.json" ;;
    gpt3-6.7b-slice) ladder --preset gpt3-6.7b-slice --repeat 2 --peers ;;
    gpt3-6.7b-slice-batch-4) ladder --preset gpt3-6.7b-slice --batch-size 4 ;; # fits 80 GB
    gpt3-6.7b-slice-minute) ladder --preset gpt3-6.7b-slice --batch-size 4 --seconds 60 --peers --no-roofs ;; # what lasts
    gpt2) ladder --preset gpt2 --repeat 2 --peers ;;
    gpt2-batch-8) ladder --preset gpt2 --batch-size 8 ;;
    gpt3-xl) ladder --preset gpt3-xl ;;
    gpt2-batch-4) study ablations --preset gpt2 --batch-size 4 --only not-captured ;; # what a CUDA graph gives
    gpt2-50257) ladder --preset gpt2 --vocab-size 50257 --only 2,3 --no-roofs ;; # and not 50304
    wide-8192) ladder --preset gpt3-6.7b-slice --n-layer 3 --n-embd 8192 --n-head 64 ;;
    narrow-320) ladder --preset gpt2 --n-layer 3 --n-head 5 --n-embd 320 --seq-len 1536 --batch-size 4 ;;
    tiny) ladder --preset tiny --repeat 3 ;;
    sweep) ladder --sweep ;;
    scaling) ladder --scaling --only 2,3,4 --preset gpt3-6.7b-slice ;;
    scaling-batch-4) ladder --scaling --only 0,1,2,3,4 --preset gpt3-6.7b-slice --batch-size 4 ;; # fits 80 GB
    parity)
      learning --rows skipped-updates bf16-instead-of-fp8 "${recipes[@]}" --seeds 1 2 3 4 5 6
      learning --rows dead-mlp --seeds 1 2 3
      ;;
    parity-2048)
      learning --n-layer 4 --n-head 16 --n-embd 2048 --rows skipped-updates bf16-instead-of-fp8 "${recipes[@]}" --seeds 1 2 3
      ;;
    parity-byte-pairs)
      [ -e "$at.npy" ] || "$python" docs/byte_pairs.py "$at.npy"
      learning --rows 3 4 --seeds 1 2 3 --data "$at.npy"
      ;;
    parity-decaying) learning --rows decaying-rate decaying-rate-fp8 --seeds 1 2 3 ;;
    # Only rows of one card can be compared, so these are three pieces.
    ablations-fp32) study ablations --preset gpt3-6.7b-slice --only 0_baseline ;;
    ablations)
      study ablations --preset gpt3-6.7b-slice \
        --only 1_cublas 2_sdpa captured-not-compiled compiled-adamw compiled-not-captured
      ;;
    ablations-fp8) study ablations --preset gpt3-6.7b-slice --only 4_transformer_engine te_layer torchao_float8 ;;
    ablations-gpt2) # and faults that the proof of the same work has to see
      study ablations --preset gpt2 --only tf32-alone fp16-with-loss-scaling flash-attention-kernel captured-not-compiled \
        compiled-not-captured te-linear-alone bf16-instead-of-fp8 bf16-head current-scaling attention-without-its-mask dead-mlp dead-mlp-all
      ;;
    llama | hugging-face-gpt2) # need transformers
      file=examples/${name#hugging-face-}.py
      ladder --model "$file"
      ;;
    guide) study loop ;;
    gradients) "$python" -m anatomy gradients --json "$at/gradients.json" >"$at/report.md" ;;
    anatomy) "$python" -m anatomy all --json "$at/anatomy.json" >"$at/report.md" ;;
  esac
  # A Python that lacks a package would skip rows that the record has.
  lost="$("$python" docs/tables.py --lost "$to" "$at")" || fail "$lost. Delete $to first if nothing is missing"
  rm -rf "$to-confirmation" # it confirmed the record that is replaced
  keep "$at" "$to"
done
PYTHON="$python" docs/renew.sh
