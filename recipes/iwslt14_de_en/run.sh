#!/usr/bin/env bash
# Trains on what prepare.sh made, translates the test set and scores: run.sh OUTPUT [options, see ../train.sh]
here=$(cd "$(dirname "$0")" && pwd)
architecture=transformer_iwslt_de_en updates=50000 max_length=256 length_penalty=1
training=(
    --share-all-embeddings --dropout 0.3 --weight-decay 0.0001 --label-smoothing 0.1
    --adam-betas '(0.9, 0.98)' --clip-norm 0.0
    --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 --max-tokens 4096
    --keep-last-epochs 10
)
source "$here/../train.sh"
