#!/usr/bin/env bash
# Tests, checks and measures everything on a GPU, in one command of about ten minutes. A stage that fails or runs out of
# time does not stop the others. Run it in the repository's root, without installing lsq.
#
#   benchmarks/gpu_round.sh [--device cuda|emulator] [--quick] [--minutes N] [--python COMMAND] [STAGE ...]
#
# Stages, all of them by default and the most wanted first; those that are chosen share the time, and what one leaves
# goes to the next ones:
#   smoke      bench_numbers.py: two trainings from nothing to translations; int8 must get 95 % of the numbers right
#   tests      tests marked gpu
#   tune       lsq tune: algorithms of cuBLASLt for the products of base on this device, which later stages use
#   step       bench_gpu_step.py: a step of base and big and its peak of memory, beside fairseq, torch.compile, torchao
#   gemm       bench_gemm.py
#   kernels    bench_launch.py, and bench_operations.py
#   sanitizer  tests of operations under compute-sanitizer: memcheck, then racecheck
#
# A folder .whl with wheels (see gpu_wheels.sh) is installed into a temporary folder first. --device emulator tries the
# round without a GPU, on tiny shapes; its figures mean nothing. Everything is kept in the folder $OUT, by default a new
# one in /tmp: log.txt, <stage>.jsonl, tuned.json, results.md; all but the log can go into benchmarks/results as they
# are. The exit status is 1 if a stage failed or ran out of time.
set -uo pipefail

device=cuda quick="" minutes=10 python=python3
threads=$(nproc)
((threads > 8)) && threads=8
stages=()
while (($#)); do
    case $1 in
    --device) device=$2 && shift 2 ;;
    --minutes) minutes=$2 && shift 2 ;;
    --python) python=$2 && shift 2 ;;
    --quick) quick=--quick && shift ;;
    smoke | tests | tune | step | gemm | kernels | sanitizer) stages+=("$1") && shift ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
    esac
done
((${#stages[@]})) || stages=(smoke tests tune step gemm kernels sanitizer)
case $device in
cuda) ;;
emulator) quick=--quick ;;
*) echo "--device is cuda or emulator, not $device" >&2 && exit 2 ;;
esac

declare -A shares=([smoke]=28 [tests]=16 [tune]=6 [step]=26 [gemm]=8 [kernels]=12 [sanitizer]=8)
declare -A verdicts=() took=()
setup_seconds=60 # for wheels, and as many for libraries
close_seconds=15 # to end a stage, and to write the tables
start_up=8       # of a benchmark: seconds before it measures
failures=0

OUT=${OUT:-$(mktemp -d /tmp/gpu_round.XXXXXX)}
mkdir -p "$OUT"
rm -f "$OUT"/*.jsonl "$OUT/tuned.json"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 XDG_CONFIG_HOME=$work/config TMPDIR=$work

# limited SECONDS COMMAND...: ask the command to end when its time is up, and end it soon after.
limited() {
    timeout --signal=TERM --kill-after=10 "$@"
}

install_wheels() {
    compgen -G ".whl/*.whl" >/dev/null || return 0
    limited "$setup_seconds" "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$work/site" .whl/*.whl && export PYTHONPATH=$PWD:$work/site
}

build_libraries() {
    limited "$setup_seconds" "$python" setup.py --quiet build_ext --inplace
}

# run_tests SECONDS FOLDER [COMMAND...]: the tests for a GPU in a folder, under a command.
run_tests() {
    local seconds=$1 options=(-q -p no:cacheprovider -m gpu "$2")
    shift 2
    [[ $device == cuda ]] || options=(-q -p no:cacheprovider tests/ops/test_append_cuda.py)
    "$python" -c "import xdist" 2>/dev/null && [[ $device == cuda ]] && options+=(-n 6)
    limited "$seconds" "$@" "$python" -m pytest "${options[@]}"
}

stage_smoke() {
    measure smoke "$1" numbers --device "$device" --threads "$threads"
}

stage_tests() {
    run_tests "$1" tests
}

stage_sanitizer() {
    if [[ $device != cuda ]] || ! command -v compute-sanitizer >/dev/null; then
        echo "no compute-sanitizer here"
        return 77
    fi
    local tool status failed=0
    for tool in memcheck racecheck; do
        # Without PyTorch's caching allocator, every tensor has memory of its own, and its end is known.
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 run_tests $(($1 / 2)) tests/ops compute-sanitizer --tool "$tool" \
            --target-processes all --kernel-name kns=lsq_ --error-exitcode 9 | tee "$work/$tool.log"
        status=${PIPESTATUS[0]}
        echo "$tool: status $status"
        if grep -Eq "= (Invalid|Misaligned)|Race reported|SUMMARY: [1-9]" "$work/$tool.log"; then
            failed=1
        elif ((status == 124 || status == 137)); then
            echo "$tool: out of time, with nothing found until then"
        elif ((status)); then
            failed=1
        fi
    done
    return $failed
}

# measure STAGE SECONDS NAME OPTIONS...: run bench_NAME.py and keep its result with those of the stage.
measure() {
    local stage=$1 seconds=$2 name=$3 status
    shift 3
    echo "-- bench_$name.py $*"
    limited "$seconds" "$python" "benchmarks/bench_$name.py" $quick --json "$work/$name.json" "$@"
    status=$?
    [[ -f $work/$name.json ]] && cat "$work/$name.json" >>"$OUT/$stage.jsonl"
    return $status
}

# measuring SECONDS: the time in which a benchmark that has so many may begin measurements.
measuring() {
    echo $(($1 > 2 * start_up ? $1 - start_up : $1 / 2))
}

stage_kernels() {
    # What is quick comes first; what is left of its time goes to the others.
    local end=$((SECONDS + $1)) failed=0 seconds launch=()
    [[ $device == cuda ]] && launch=(--gpu)
    measure kernels $(($1 / 10)) launch "${launch[@]}" || failed=1
    seconds=$((end - SECONDS))
    measure kernels "$seconds" operations --device "$device" --rounds 5 --seconds "$(measuring "$seconds")" || failed=1
    return $failed
}

stage_tune() {
    if [[ $device != cuda ]]; then
        echo "there are no tuned files for an emulator"
        return 77
    fi
    limited "$1" "$python" -m lsq.cli tune --arch lsq_transformer_wmt_en_de --max-tokens 8192 --step 4096 \
        --device cuda --backward int8 --seconds "$(measuring "$1")" --output "$OUT/tuned.json" --quiet
    local status=$?
    [[ -f $OUT/tuned.json ]] && mkdir -p "$XDG_CONFIG_HOME/lsq/gemm" && cp "$OUT/tuned.json" "$XDG_CONFIG_HOME/lsq/gemm"
    return $status
}

stage_gemm() {
    measure gemm "$1" gemm --device "$device" --rounds 5 --seconds "$(measuring "$1")"
}

stage_step() {
    measure step "$1" gpu_step --device "$device" --rounds 5 --seconds "$(measuring "$1")"
}

run_stage() {
    local stage=$1 seconds=$2 begun=$SECONDS status
    echo "== $stage, at most $seconds seconds"
    "stage_$stage" "$seconds"
    status=$?
    took[$stage]=$((SECONDS - begun))
    case $status in
    0) verdicts[$stage]=ok ;;
    77) verdicts[$stage]="not run" ;;
    124 | 137) verdicts[$stage]="out of time" && failures=1 ;;
    *) verdicts[$stage]=FAILED && failures=1 ;;
    esac
}

# left SHARE TOTAL: the seconds that a stage with such a share may take of what all those to come may take.
left() {
    local seconds=$(((60 * minutes - close_seconds - SECONDS) * $1 / $2))
    echo $((seconds > 1 ? seconds : 1))
}

main() {
    local stage total=0 files
    [[ $device != cuda ]] || nvidia-smi
    install_wheels || { echo "the wheels cannot be installed" && failures=1; }
    build_libraries || { echo "the libraries cannot be built" && failures=1; }
    for stage in "${stages[@]}"; do total=$((total + shares[$stage])); done
    for stage in "${stages[@]}"; do
        run_stage "$stage" "$(left "${shares[$stage]}" "$total")"
        total=$((total - shares[$stage]))
    done
    files=$(compgen -G "$OUT/*.jsonl") &&
        "$python" benchmarks/results_table.py $files --short --output "$OUT/results.md"
    for stage in "${stages[@]}"; do
        printf '%-10s %-12s %4d s\n' "$stage" "${verdicts[$stage]}" "${took[$stage]}"
    done
    echo "kept in $OUT"
    return $failures
}

main 2>&1 | tee "$OUT/log.txt"
exit "${PIPESTATUS[0]}"
