#!/usr/bin/env bash
# Translation quality of int8 training against float: the same small model, data, seeds and number of updates.
#
#   recipes/quality/run.sh TEXT OUTPUT [UPDATES [SEED ...]]
#
# TEXT holds train.en, train.de, valid.*, test.*. Everything is resumable: run the same command again. Float models and
# int8 models from scratch come first; then int8 goes on from the finished float models, and so does float itself, for
# a fair comparison.
set -euo pipefail
text=$1 output=$2 updates=${3:-2000}
seeds=("${@:4}")
[ ${#seeds[@]} -gt 0 ] || seeds=(1 2)

train() { # name seed options...
    local name=$1 seed=$2
    shift 2
    lsq train-text --src "$text/train.en" --tgt "$text/train.de" --valid-src "$text/valid.en" --valid-tgt "$text/valid.de" \
        --test-src "$text/test.en" --test-tgt "$text/test.de" --output "$output" --vocabulary-size 4000 --max-length 256 \
        --layers 2 --hidden 128 --feed-forward 512 --heads 4 --dropout 0.1 --max-tokens 4096 --lr 0.002 --warmup 400 \
        --validate-every "$((updates / 4))" --log-every 25 --updates "$updates" --seed "$seed" --name "$name" "$@"
}

for seed in "${seeds[@]}"; do
    train "float-$seed" "$seed" --mode float
    for backward in int8 float; do
        train "int8-$backward-$seed" "$seed" --mode int8 --lsq-backward "$backward"
    done
done
for seed in "${seeds[@]}"; do
    float="$output/float-$seed/model/checkpoint_last.pt"
    train "float-again-$seed" "$seed" --mode float --lr 0.001 -- --finetune-from-model "$float"
    for backward in int8 float; do
        train "int8-$backward-from-float-$seed" "$seed" --mode int8 --lsq-backward "$backward" --lr 0.001 --lsq-from "$float"
    done
done
python "$(dirname "$0")/summary.py" "$output"
