#!/usr/bin/env bash
# Your own text, in float and in int8: run.sh SOURCE TARGET OUTPUT [options of lsq train-text], or run.sh --dry-run OUTPUT
set -euo pipefail
if [ "${1:-}" = --dry-run ] && [ $# -gt 1 ]; then
    output=$2/dry-run # what is real there stays
    python3 "$(dirname "$0")/../extract.py" toy "$output/toy"
    tiny=(--vocabulary-size 60 --max-length 40 --max-tokens 400 --updates 3 --layers 1 --hidden 16 --feed-forward 32 --heads 2)
    set -- "$output/toy/train.en" "$output/toy/train.de" "$output" "${tiny[@]}" "${@:3}"
fi
[ $# -ge 3 ] || { echo "usage: run.sh SOURCE TARGET OUTPUT [options of lsq train-text], or run.sh --dry-run OUTPUT" >&2; exit 2; }
for mode in float int8; do
    lsq train-text --src "$1" --tgt "$2" --output "$3" --mode $mode "${@:4}"
done
