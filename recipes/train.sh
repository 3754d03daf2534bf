# Shared by the run.sh of the public tasks, which set: here, training (options of lsq train), updates, max_length,
# and, where the batch should stay the same on any number of processes, batches (max-tokens batches in an update).
#
#   run.sh OUTPUT [--mode int8|float] [--processes N] [--machines M --machine R --master HOST[:PORT] [--name JOB]]
#                 [--gradients MODE] [--updates N] [--print] [--dry-run] [-- further options of lsq train]
#
# OUTPUT is what prepare.sh filled. Processes are per machine: one for each GPU, or more than one on the CPU with --cpu
# after the --. With several machines, run.sh is started on each, with its number from 0; all see the same OUTPUT, and
# meet at the master under the name of the job (default lsq). MODE is how gradients travel between processes, as
# --lsq-gradients has it (default auto). --print only shows the command. --dry-run trains three updates of a tiny model
# on toy text in OUTPUT/dry-run.
set -euo pipefail

usage() {
    sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

mode=int8 processes=1 machines=1 machine=0 master=127.0.0.1 name=lsq gradients=auto print=0 dry_run=0 output=
while [ $# -gt 0 ]; do
    case $1 in
        --mode | --processes | --machines | --machine | --master | --name | --gradients | --updates)
            [ $# -gt 1 ] || usage
            declare "${1#--}=$2"
            shift
            ;;
        --print) print=1 ;;
        --dry-run) dry_run=1 ;;
        --) shift && break ;;
        -*) usage ;;
        *) output=$1 ;;
    esac
    shift
done
[ -n "$output" ] || usage
case $mode in
    int8 | float) ;;
    *) echo "run.sh: --mode $mode is not a mode; there are int8 and float" >&2; exit 2 ;;
esac
for number in processes machines updates; do
    [[ ${!number} =~ ^[1-9][0-9]*$ ]] || { echo "run.sh: --$number ${!number} is not a whole number above 0" >&2; exit 2; }
done
[[ $machine =~ ^[0-9]+$ && $machine -lt $machines ]] || {
    echo "run.sh: --machine $machine is not one of 0 to $((machines - 1)), given --machines $machines" >&2
    exit 2
}

if [ $mode = int8 ]; then
    training+=(--arch "lsq_$architecture" --task lsq_translation --criterion lsq_label_smoothed_cross_entropy
        --optimizer lsq_adam)
else
    training+=(--arch "$architecture" --task lsq_translation --criterion label_smoothed_cross_entropy --optimizer adam)
fi
total=$((processes * machines))
[ $total = 1 ] || training+=(--lsq-gradients "$gradients")
if [ -n "${batches:-}" ]; then
    training+=(--update-freq $((batches > total ? batches / total : 1)))
fi
if [ $dry_run = 1 ]; then
    "$here/prepare.sh" "$output" --dry-run
    output=$output/dry-run
    updates=3
    training+=(--max-tokens 400 --cpu --num-workers 0 --update-freq 1)
    for side in encoder decoder; do
        training+=(--$side-layers 1 --$side-embed-dim 16 --$side-ffn-embed-dim 32 --$side-attention-heads 2)
    done
fi

command=(lsq train "$output/data" --save-dir "$output/$mode/model" "${training[@]}" --max-update "$updates" "$@")
if [ "$machines" -gt 1 ]; then
    [[ $master = *:* ]] || master+=:29500
    command=(torchrun --nnodes "$machines" --rdzv-backend c10d --rdzv-endpoint "$master" --rdzv-id "$name"
        --nproc-per-node "$processes" --no-python "${command[@]}")
elif [ "$processes" -gt 1 ]; then
    # --standalone would wait in vain where localhost or the host has no address.
    command=(torchrun --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1
        --nproc-per-node "$processes" --no-python "${command[@]}")
fi
printf '%q ' "${command[@]}"
echo
[ $print = 0 ] || exit 0
"${command[@]}"
[ "$machine" = 0 ] || exit 0

translations=$output/$mode/translation
mkdir -p "$translations"
generation=(--path "$output/$mode/model/checkpoint_best.pt" --gen-subset test --beam 5 --lenpen "$length_penalty"
    --max-len-b "$max_length" --bpe sentencepiece --sentencepiece-model "$output/vocabulary/sentencepiece.model")
if [ $mode = int8 ] || [ $dry_run = 1 ]; then
    generation+=(--cpu)
fi
[ $dry_run = 0 ] || generation+=(--num-workers 0)
lsq generate "$output/data" --results-path "$translations" "${generation[@]}"
sed -n 's/^D-//p' "$translations/generate-test.txt" | sort --numeric-sort --stable | cut -f 3 > "$translations/hypotheses.txt"
sacrebleu "$output/data/test.tgt" --input "$translations/hypotheses.txt" --metrics bleu chrf | tee "$output/$mode/scores.json"
