#!/usr/bin/env bash
# Downloads what the benchmarks need beyond PyTorch, CUDA and the common packages: fairseq with its requirements, and
# torchao. For Python 3.12 on x86-64, to be carried to a GPU machine that has no network; gpu_round.sh installs them.
#
#   benchmarks/gpu_wheels.sh [FOLDER]    by default .whl
set -euo pipefail

folder=${1:-.whl}
limit_kib=$((64 * 1024))
wheels=(fairseq-fixed==0.12.3.1 hydra-core==1.3.2 omegaconf==2.3.0 bitarray==3.12.3 cffi==2.1.1 pycparser==3.12)
wheels+=(num2words==0.5.14 torchao==0.18.0)
# Of these, the index has sources alone; they are plain Python.
sources=(antlr4-python3-runtime==4.9.3 docopt==0.6.2)

platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done

mkdir -p "$folder"
rm -f "$folder"/*.whl # two versions of one package would stop the installation
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --dest "$folder" "${wheels[@]}"
python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder" "${sources[@]}"

(cd "$folder" && ls -l -- *.whl | awk '{ print $5, $9 }')
size_kib=$(du -sk "$folder" | cut -f1)
echo "$((size_kib / 1024)) MiB in $folder"
if ((size_kib > limit_kib)); then
    echo "$folder holds more than $((limit_kib / 1024)) MiB" >&2
    exit 1
fi
