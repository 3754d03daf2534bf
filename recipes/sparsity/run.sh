#!/usr/bin/env bash
# What 2:4 sparsity costs a translator: from the same float model, the same number of updates dense in int8, sparse in
# float, and sparse in int8.
#
#   recipes/sparsity/run.sh TEXT OUTPUT [UPDATES [SEED ...]]
#
# TEXT holds train.en, train.de, valid.*, test.*. Everything is resumable: run the same command again.
set -euo pipefail
text=$1 output=$2 updates=${3:-300}
seeds=("${@:4}")
[ ${#seeds[@]} -gt 0 ] || seeds=(1 2)

train() { # name seed updates options...
    local name=$1 seed=$2 updates=$3
    shift 3
    lsq train-text --src "$text/train.en" --tgt "$text/train.de" --valid-src "$text/valid.en" --valid-tgt "$text/valid.de" \
        --test-src "$text/test.en" --test-tgt "$text/test.de" --output "$output" --vocabulary-size 4000 --max-length 256 \
        --layers 2 --hidden 128 --feed-forward 512 --heads 4 --dropout 0.1 --max-tokens 4096 --log-every 25 \
        --updates "$updates" --seed "$seed" --name "$name" "$@"
}

for seed in "${seeds[@]}"; do
    train "float-$seed" "$seed" 1500 --mode float --arch lsq_transformer --lr 0.002 --warmup 400 --validate-every 375
    further=(--lr 0.0005 --warmup 30 --validate-every 100 --lsq-from "$output/float-$seed/model/checkpoint_last.pt")
    train "int8-$seed" "$seed" "$updates" --mode int8 "${further[@]}"
    train "int8-sparse-$seed" "$seed" "$updates" --mode int8 --lsq-sparsity 2:4 "${further[@]}"
    train "float-sparse-$seed" "$seed" "$updates" --mode float --arch lsq_transformer --lsq-sparsity 2:4 "${further[@]}"
done
