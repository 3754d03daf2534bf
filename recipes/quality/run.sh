#!/usr/bin/env bash
# What int8 loses from scratch: the same small translator in float and in int8, paired, over several seeds.
#
#   recipes/quality/run.sh TEXT OUTPUT [UPDATES [SEED ...]]
#
# TEXT holds train.en, train.de, valid.*, test.*. Everything is resumable: run the same command again.
set -euo pipefail
text=$1 output=$2 updates=${3:-1500}
seeds=("${@:4}")
[ ${#seeds[@]} -gt 0 ] || seeds=(1 2 3 4)

lsq compare --src "$text/train.en" --tgt "$text/train.de" --valid-src "$text/valid.en" --valid-tgt "$text/valid.de" \
    --test-src "$text/test.en" --test-tgt "$text/test.de" --output "$output" --vocabulary-size 4000 --max-length 256 \
    --layers 2 --hidden 128 --feed-forward 512 --heads 4 --dropout 0.1 --max-tokens 1024 --lr 0.002 --warmup 400 \
    --updates "$updates" --validate-every "$((updates / 4))" --seeds "${seeds[@]}" \
    --side int8="--mode int8" --side learned="--mode int8 --lsq-clips learned" \
    --side int8-float="--mode int8 --lsq-backward float"
