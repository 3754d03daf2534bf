#!/usr/bin/env bash
# Text, vocabulary and data of IWSLT'14 German-English: prepare.sh OUTPUT [--download] [--dry-run]
task=iwslt14 source=de target=en vocabulary_size=10000 max_length=256
urls=(http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz)
source "$(dirname "$0")/../prepare.sh"
