#!/usr/bin/env bash
# Checks and measures everything on a GPU, in one command of at most ten minutes. A stage that fails, hangs or runs out
# of time does not stop the others, and what was found until then is kept. Run it in the repository's root, without
# installing lsq. Without a GPU it says so, with exit status 2, and writes nothing.
#
#   benchmarks/gpu_round.sh [--device cuda|emulator] [--rehearse] [--minutes N] [--python COMMAND] [STAGE ...]
#
# Stages, in this order; those that are chosen share the time, and what one leaves goes to the next ones:
#   probe      gpu_probe.py: every kernel alone, against its reference: ok, wrong, fault or hangs
#   step       bench_gpu_step.py: a step of big, of base, by kernel, beside torch.compile, torchao, fairseq
#   tests      tests marked gpu
#   products   lsq tune: algorithms and tiles for three products of big (gpu_tune.csv), beside bfloat16
#   smoke      bench_numbers.py: two trainings from nothing to translations; int8 must get 95 % of the numbers right
# Two more run where they are named:
#   kernels    bench_operations.py
#   sanitizer  the probe under compute-sanitizer's memcheck
#
# What gpu_carry.sh has put into the folder .carry is used: wheels, libraries, compiled kernels. --device emulator tries
# the round without a GPU, on tiny shapes; its figures mean nothing. --rehearse does so with a kernel that faults, one
# that hangs and one that is wrong, and with such tests: the report must name each.
#
# Everything is kept in the folder $OUT, by default a new one in /tmp, as soon as it is there: log.txt, probe.json,
# step.json, tuned.json, smoke.json (kernels: operations.json), results.md; all but the log can go into
# benchmarks/results. Ctrl-C ends the stage that runs; what was found is kept. The exit status is 1 if a stage failed,
# ran out of time or was stopped.
set -uo pipefail

device=cuda quick="" minutes=10 python=python3 rehearse=""
threads=$(nproc)
((threads > 8)) && threads=8
stages=()
while (($#)); do
    case $1 in
    --device) device=$2 && shift 2 ;;
    --minutes) minutes=$2 && shift 2 ;;
    --python) python=$2 && shift 2 ;;
    --rehearse) device=emulator rehearse=yes && shift ;;
    probe | step | tests | products | smoke | kernels | sanitizer) stages+=("$1") && shift ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
    esac
done
((${#stages[@]})) || stages=(probe step tests products smoke)
case $device in
cuda) ;;
emulator) quick=--quick ;;
*) echo "--device is cuda or emulator, not $device" >&2 && exit 2 ;;
esac
[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "--minutes is a whole number from 1 on, not $minutes" >&2 && exit 2; }

if [[ $device == cuda ]] && ! "$python" -c 'import torch; exit(not torch.cuda.is_available())'; then
    echo "$python has no PyTorch that sees a GPU, so nothing was run; --device emulator tries the round without one" >&2
    exit 2
fi

declare -A shares=([probe]=8 [step]=23 [tests]=28 [products]=22 [smoke]=19 [kernels]=20 [sanitizer]=10)
declare -A verdicts=() took=()
setup_seconds=60 # for wheels, and as many for libraries
close_seconds=15 # to end a stage, and to write the tables
start_up=8       # of a benchmark: seconds before it measures
hangs=60         # seconds that a test or a kernel may take
not_run=78 lost=77
failures=0

OUT=${OUT:-$(mktemp -d /tmp/gpu_round.XXXXXX)}
# Of a round before in the same folder nothing may stay.
if ! mkdir -p "$OUT" || ! : >"$OUT/log.txt" ||
    ! rm -f "$OUT"/{probe,step,operations,smoke,tuned}.json "$OUT/results.md"; then
    echo "nothing can be kept in $OUT: name another folder in OUT" >&2 && exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 XDG_CONFIG_HOME=$work/config TMPDIR=$work
[[ $device == cuda && -d .carry/cache ]] && export XDG_CACHE_HOME=$PWD/.carry/cache

# limited SECONDS COMMAND...: ask the command to end when its time is up or the round is stopped, and end it soon after.
limited() {
    set -m # else it would ignore SIGINT
    timeout --signal="${signal:-TERM}" --kill-after=10 "$@" &
    set +m
    child=$!
    wait "$child"
    local status=$?
    [[ -z $stopped ]] || wait "$child" # the signal has ended the wait before
    child=""
    return $status
}
child="" stopped=""

stop() {
    stopped=yes
    [[ -z $child ]] || kill -TERM "$child" 2>/dev/null
}

install_wheels() {
    compgen -G ".carry/wheels/*.whl" >/dev/null || return 0
    limited "$setup_seconds" "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$work/site" .carry/wheels/*.whl && export PYTHONPATH=$PWD:$work/site
}

# Libraries that were carried are current by their digests: they are built again only where none of them is left. Those
# of a checkout stay, whatever fails.
build_libraries() {
    local load="from lsq.native import loader, runtime; loader.library(), runtime.library()"
    limited "$setup_seconds" "$python" -c "$load" 2>/dev/null && return
    [[ -z $stopped ]] || return
    if compgen -G ".carry/libraries/*.so" >/dev/null; then
        cp --remove-destination .carry/libraries/*.so lsq/native/
        limited "$setup_seconds" "$python" -c "$load" && return
        rm -f lsq/native/*.so
    fi
    limited "$setup_seconds" "$python" setup.py --quiet build_ext --inplace
}

# measure FILE SECONDS SCRIPT OPTIONS...: run a benchmark, which keeps its result in $OUT/FILE.json as it goes.
measure() {
    local file=$1 seconds=$2 script=$3
    shift 3
    echo "-- $script.py $*"
    limited "$seconds" "$python" "benchmarks/$script.py" $quick --json "$OUT/$file.json" "$@"
}

# measuring SECONDS: the time in which a benchmark that has so many may begin measurements.
measuring() {
    echo $(($1 > 2 * start_up ? $1 - start_up : ($1 + 1) / 2))
}

stage_probe() {
    local options=()
    [[ -n $rehearse ]] && options=(--silence 20 --only elementwise.cu gated.cu rotation.cu scales.cu
        --plant lsq_append=hang --plant lsq_gated=wrong --plant lsq_rotate=fault)
    measure probe "$1" gpu_probe --device "$device" --seconds "$(measuring "$1")" "${options[@]}"
}

stage_step() {
    measure step "$1" bench_gpu_step --device "$device" --rounds 5 --seconds "$(measuring "$1")"
}

# A test that hangs ends its process and is named; the others go on in a new one.
stage_tests() {
    local options=(-q -p no:cacheprovider --timeout-method thread --session-timeout "$(measuring "$1")")
    local tests=(tests/{ops,native,emulator,quant,optim,program,run,gemm,layers,dist} tests/serving/test_engine_cuda.py)
    options+=(--timeout "$hangs" -m "gpu and not thorough and not slow")
    if [[ -n $rehearse ]]; then
        plant_tests && tests=("$work/planted") options+=(--timeout 10 -n 2)
    elif [[ $device != cuda ]]; then
        tests=(tests/ops/test_attention.py) options=(-q -p no:cacheprovider -k "one_row_more and emulator")
    else
        options+=(-n 6)
    fi
    signal=INT limited "$1" "$python" -m pytest "${options[@]}" "${tests[@]}"
}

# Tests that fail, hang and lose the GPU, beside one that passes, as if there were a GPU.
plant_tests() {
    mkdir "$work/planted"
    cat >"$work/planted/conftest.py" <<'PLANTED'
import pathlib, torch
from tests.conftest import *
fault = pathlib.Path(f"{__file__}.{os.getpid()}")
def synchronize():
    if fault.exists():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.is_available, torch.cuda.synchronize = lambda: True, synchronize
PLANTED
    cat >"$work/planted/test_planted.py" <<'PLANTED'
import time, pytest, conftest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert 1 == 2, "codes differ"
def test_hangs(): time.sleep(1e6)
def test_faults(): conftest.fault.touch(); raise RuntimeError("lsq_rotate cannot be launched")
PLANTED
}

stage_products() {
    [[ $device == cuda ]] || return $not_run # there are no tuned files for an emulator
    limited "$1" "$python" -m lsq.commands.cli tune --shapes benchmarks/gpu_tune.csv --device cuda \
        --seconds "$(measuring "$1")" --output "$OUT/tuned.json" --quiet
}

stage_smoke() {
    measure smoke "$1" bench_numbers --device "$device" --threads "$threads"
}

stage_kernels() {
    measure operations "$1" bench_operations --device "$device" --rounds 5 --seconds "$(measuring "$1")"
}

stage_sanitizer() {
    if [[ $device != cuda ]] || ! command -v compute-sanitizer >/dev/null; then
        echo "no compute-sanitizer here"
        return $not_run
    fi
    # Without PyTorch's caching allocator, every tensor has memory of its own, and its end is known.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 limited "$1" compute-sanitizer --tool memcheck --target-processes all \
        --kernel-name kns=lsq_ --error-exitcode 9 "$python" benchmarks/gpu_probe.py --seconds "$(measuring "$1")"
}

run_stage() {
    local stage=$1 seconds=$2 begun=$SECONDS status
    verdicts[$stage]=stopped took[$stage]=0
    [[ -z $stopped ]] || return
    echo "== $stage, at most $seconds seconds"
    "stage_$stage" "$seconds"
    status=$?
    took[$stage]=$((SECONDS - begun))
    [[ -z $stopped ]] || return
    if ((status == 137 && took[$stage] < seconds)); then
        echo "$stage was killed before its time was up, perhaps for the memory it took" && status=1
    fi
    case $status in
    0) verdicts[$stage]=ok ;;
    "$not_run") verdicts[$stage]="not run" ;;
    "$lost") verdicts[$stage]="LOST GPU" && failures=1 ;;
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
    local stage total=0 files=()
    [[ $device != cuda ]] || limited "$setup_seconds" nvidia-smi
    install_wheels || { echo "the wheels cannot be installed" && failures=1; }
    build_libraries || { echo "the libraries cannot be built" && failures=1; }
    for stage in "${stages[@]}"; do total=$((total + shares[$stage])); done
    for stage in "${stages[@]}"; do
        run_stage "$stage" "$(left "${shares[$stage]}" "$total")"
        total=$((total - shares[$stage]))
    done
    rm -f "$OUT"/{probe,step,operations,smoke}.partial # of a benchmark that was ended as it wrote
    for stage in probe step operations smoke; do
        [[ ! -e $OUT/$stage.json ]] || files+=("$OUT/$stage.json")
    done
    if ((${#files[@]})) &&
        ! limited "$close_seconds" "$python" benchmarks/gpu.py "${files[@]}" --output "$OUT/results.md"; then
        echo "the tables cannot be written" && failures=1
    fi
    for stage in "${stages[@]}"; do
        printf '%-10s %-12s %4d s\n' "$stage" "${verdicts[$stage]}" "${took[$stage]}"
    done
    echo "kept in $OUT"
    [[ -z $stopped ]] && return $failures
}

exec > >(trap '' INT TERM && exec tee "$OUT/log.txt") 2>&1
log=$!
trap stop INT TERM
main
status=$?
exec >&- 2>&-
wait "$log"
exit $status
