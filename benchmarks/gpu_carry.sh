#!/usr/bin/env bash
# Makes what is carried to a GPU machine that has no network, in the folder .carry, which gpu_round.sh takes: what the
# benchmarks need beyond PyTorch, CUDA and the common packages (fairseq with its requirements, and torchao; for Python
# 3.12 on x86-64), the libraries, and the kernels compiled for one kind of GPU. It takes NVRTC and no GPU.
#
#   benchmarks/gpu_carry.sh [--target sm_90a] [--python COMMAND]
set -euo pipefail

target=sm_90a python=python3
while (($#)); do
    case $1 in
    --target) target=$2 && shift 2 ;;
    --python) python=$2 && shift 2 ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
    esac
done

folder=$PWD/.carry
limit_kib=$((48 * 1024)) # of 64 MiB, which the repository shares
wheels=(fairseq-fixed==0.12.3.1 hydra-core==1.3.2 omegaconf==2.3.0 bitarray==3.12.3 cffi==2.1.1 pycparser==3.12)
wheels+=(num2words==0.5.14 torchao==0.18.0)
# Of these, the index has sources alone; they are plain Python.
sources=(antlr4-python3-runtime==4.9.3 docopt==0.6.2)

platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done

rm -rf "$folder" # two versions of one package would stop the installation
mkdir -p "$folder"/{wheels,libraries,cache}
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --dest "$folder/wheels" "${wheels[@]}"
python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" "${sources[@]}"

"$python" setup.py --quiet build_ext --inplace
cp lsq/native/*.so "$folder/libraries"

XDG_CACHE_HOME=$folder/cache "$python" benchmarks/compile_kernels.py --target "$target" --round >/dev/null
rm -rf "$folder/cache/lsq/emulator"

du -sk "$folder"/*
size_kib=$(du -sk "$folder" | cut -f1)
if ((size_kib > limit_kib)); then
    echo "$folder holds more than $((limit_kib / 1024)) MiB" >&2
    exit 1
fi
