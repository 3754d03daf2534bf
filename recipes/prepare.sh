# Shared by the prepare.sh of the public tasks, which set: task, source, target, urls, vocabulary_size, max_length.
#
#   prepare.sh OUTPUT [--download] [--dry-run]
#
# Looks for the archives in OUTPUT/raw; downloads what is missing only with --download. Writes OUTPUT/raw,
# OUTPUT/plain and, by lsq train-text, OUTPUT/{text,vocabulary,data}; --dry-run writes toy text into OUTPUT/dry-run.
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

download=0 dry_run=0 output=
for argument in "$@"; do
    case $argument in
        --download) download=1 ;;
        --dry-run) dry_run=1 ;;
        -*) echo "prepare.sh: unknown option $argument; there are --download and --dry-run" >&2; exit 2 ;;
        *) output=$argument ;;
    esac
done
[ -n "$output" ] || { echo "usage: prepare.sh OUTPUT [--download] [--dry-run]" >&2; exit 2; }

fetch() { # make sure of every archive and unpack it
    local url archive missing=()
    for url in "${urls[@]}"; do
        [ -e "$output/raw/$(basename "$url")" ] || missing+=("$url")
    done
    if [ ${#missing[@]} -gt 0 ] && [ $download = 0 ]; then
        echo "prepare.sh: $output/raw is incomplete; get ${missing[*]} or give --download" >&2
        exit 2
    fi
    mkdir -p "$output/raw"
    for url in "${urls[@]}"; do
        archive=$output/raw/$(basename "$url")
        if [ ! -e "$archive" ]; then
            echo "downloading $url"
            curl --fail --location --output "$archive.partial" "$url"
            mv "$archive.partial" "$archive"
        fi
        tar --extract --gzip --file "$archive" --directory "$output/raw"
    done
}

if [ $dry_run = 1 ]; then
    output=$output/dry-run # what is real there stays
    python3 "$recipes/extract.py" toy "$output/plain"
    vocabulary_size=60
else
    fetch
    python3 "$recipes/extract.py" "$task" "$output/raw" "$output/plain"
fi
files=()
for split in train valid test; do
    prefix=${split/train/} prefix=${prefix:+$prefix-}
    files+=("--${prefix}src" "$output/plain/$split.$source" "--${prefix}tgt" "$output/plain/$split.$target")
done
lsq train-text --prepare-only "${files[@]}" --output "$output" --vocabulary-size "$vocabulary_size" --max-length "$max_length"
