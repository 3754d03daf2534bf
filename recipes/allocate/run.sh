#!/usr/bin/env bash
# Which bits where, for a translator: a float model, and what is left of it with weights in one format, and in mixes of
# formats of as many bits, before and after further updates.
#
#   recipes/allocate/run.sh TEXT OUTPUT [UPDATES [SEED]]
#
# TEXT holds train.en, train.de, valid.*, test.*. A small float model is trained first (1,500 updates); from it every
# format goes on for UPDATES updates (default 200), and so does float itself. Everything is resumable: run the same
# command again.
set -euo pipefail
text=$1 output=$2 updates=${3:-200} seed=${4:-1}
formats=(int2/row int3/row int4/row int6/row int8/row)
bits=(3.2 3.7 4.2)
mixes=200

train() { # name updates options...
    local name=$1 count=$2
    shift 2
    lsq train-text --src "$text/train.en" --tgt "$text/train.de" --valid-src "$text/valid.en" --valid-tgt "$text/valid.de" \
        --test-src "$text/test.en" --test-tgt "$text/test.de" --output "$output" --vocabulary-size 4000 \
        --max-length 256 --layers 2 --hidden 128 --feed-forward 512 --heads 4 --dropout 0.1 --max-tokens 4096 \
        --validate-every "$((count / 4))" --log-every 25 --updates "$count" --seed "$seed" --name "$name" "$@"
}

continued() { # name format
    train "$1-before" 8 --mode int8 --lr 1e-9 --warmup 1 --lsq-from "$float" --lsq-weight-format "$2"
    train "$1" "$updates" --mode int8 --lr 0.0005 --warmup 50 --lsq-from "$float" --lsq-weight-format "$2"
    lsq export "$output/$1" --to lsq --output "$output/$1.safetensors" --overwrite
}

train float 1500 --mode float --arch lsq_transformer --lr 0.002 --warmup 400
float="$output/float/model/checkpoint_last.pt"
train float-again "$updates" --mode float --arch lsq_transformer --lr 0.0005 --warmup 50 --lsq-from "$float"
lsq sensitivity --model "$output/float" --formats "${formats[@]}" --weights-only --output "$output/costs"
continued int8 int8
for format in int4/row int3/row; do # with the projection in int8, as in mixes, which leave tied weights out
    continued "${format%/row}" "$format,decoder.output_projection.weight=int8"
done
for most in "${bits[@]}"; do
    lsq allocate --costs "$output/costs" --bits "$most" --method refine --mixes "$mixes" --output "$output/mix-$most" \
        --overwrite
    continued "of-$most" "@$output/mix-$most/weight_format.txt"
done
python "$(dirname "$0")/summary.py" "$output" --test "$text/test.en"
