#!/usr/bin/env bash
# Translation quality over bits: a small float model goes on training with its numbers in one format after another.
#
#   recipes/formats/run.sh TEXT OUTPUT [UPDATES [SEED ...]]
#
# TEXT holds train.en, train.de, valid.*, test.*. For each seed a float model is trained first (1,500 updates); from it
# every format goes on for UPDATES updates (default 300), and so does float itself. Everything is resumable: run the
# same command again. Seeds lie in folders of their own, so that two may run at a time, one thread each.
set -euo pipefail
text=$1 output=$2 updates=${3:-300}
seeds=("${@:4}")
[ ${#seeds[@]} -gt 0 ] || seeds=(1 2)

train() { # name updates options...
    local name=$1 count=$2
    shift 2
    lsq train-text --src "$text/train.en" --tgt "$text/train.de" --valid-src "$text/valid.en" --valid-tgt "$text/valid.de" \
        --test-src "$text/test.en" --test-tgt "$text/test.de" --output "$output/$seed" --vocabulary-size 4000 \
        --max-length 256 --layers 2 --hidden 128 --feed-forward 512 --heads 4 --dropout 0.1 --max-tokens 4096 \
        --validate-every "$((count / 4))" --log-every 25 --updates "$count" --seed "$seed" --name "$name" "$@"
}

continued() { # name weights activations gradients [options...]
    train "$1" "$updates" --mode int8 --lr 0.0005 --warmup 50 --lsq-from "$float" --lsq-weight-format "$2" \
        --lsq-activation-format "$3" --lsq-gradient-format "$4" "${@:5}"
}

for seed in "${seeds[@]}"; do
    train float 1500 --mode float --arch lsq_transformer --lr 0.002 --warmup 400
    float="$output/$seed/float/model/checkpoint_last.pt"
    train float-again "$updates" --mode float --arch lsq_transformer --lr 0.0005 --warmup 50 --lsq-from "$float"
    continued int8 int8 int8 int8
    continued int6 int8 int8 int8 --lsq-bits 6
    continued int4 int4 int8 int8
    continued vsquant4 vsquant4 vsquant4 int8
    continued nvfp4 nvfp4 nvfp4 int8
    continued mxint8 mxint8 mxint8 mxint8
    continued mxfp8 mxfp8-e4m3 mxfp8-e4m3 mxfp8-e5m2
    continued fp8 fp8-e4m3/row fp8-e4m3/tensor fp8-e5m2/row
    continued log log4.3/row log4.3/tensor log4.3/row
done
python "$(dirname "$0")/summary.py" "$output"
