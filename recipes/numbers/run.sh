#!/usr/bin/env bash
# English number names to German, in float and then in int8: run.sh [--dry-run] [options of lsq numbers]
set -euo pipefail
if [ "${1:-}" = --dry-run ]; then
    shift
    set -- --output runs/numbers/dry-run --updates 3 --train-pairs 300 --test-pairs 12 --hidden 64 --feed-forward 128 "$@"
fi
exec lsq numbers "$@"
