#!/usr/bin/env bash
# Trains on what prepare.sh made, translates the test set and scores: run.sh OUTPUT [options, see ../train.sh]
here=$(cd "$(dirname "$0")" && pwd)
architecture=transformer_wmt_en_de updates=100000 max_length=256 length_penalty=0.6
batches=8
training=(
    --share-all-embeddings --dropout 0.1 --weight-decay 0.0 --label-smoothing 0.1
    --adam-betas '(0.9, 0.98)' --clip-norm 0.0
    --lr 7e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-7 --max-tokens 4096
    --save-interval-updates 2000 --keep-interval-updates 10 --no-epoch-checkpoints
)
source "$here/../train.sh"
