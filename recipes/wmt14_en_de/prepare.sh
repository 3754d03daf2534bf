#!/usr/bin/env bash
# Text, vocabulary and data of WMT'14 English-German: prepare.sh OUTPUT [--download] [--dry-run]
task=wmt14 source=en target=de vocabulary_size=32000 max_length=256
urls=(
    http://statmt.org/wmt13/training-parallel-europarl-v7.tgz
    http://statmt.org/wmt13/training-parallel-commoncrawl.tgz
    http://statmt.org/wmt14/training-parallel-nc-v9.tgz
    http://statmt.org/wmt14/test-full.tgz
)
source "$(dirname "$0")/../prepare.sh"
