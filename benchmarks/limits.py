"""What a training step on a CPU has to do, and how fast its processor and memory could do it.

The processor's peak is measured by a loop in registers (PEAK_LOOP), the memory's by a triad as
STREAM has it. Each operation is allowed as long as its multiplications take at the peak, or its
tensors from memory and to it, whichever is longer. That is a yardstick, no bound: a tensor that is
still in a cache comes faster, and floats (attention's probabilities times values) are multiplied at
half of the rate of int8, or less. A multiplication with its addition counts as two.
"""

import ctypes
import functools
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import operations
import torch
import transformer

from lsq.config import QuantConfig
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Mode
from lsq.native import sources, tiles
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.run.backends import backend

PARTS = {
    "products": ("Project", "ProjectInputGradient", "ProjectWeightGradient"),
    "attention": ("Attention", "AttentionGradient"),
    "norms": ("ResidualNorm", "ResidualNormGradient"),
    "loss": ("VocabularyLoss", "VocabularyLossGradient"),
}
"""Part of a step -> its operations."""
UPDATE, REST = "update", "rest"
"""Adam, and whatever else there is."""
ATTENTION_PRODUCTS = {"Attention": 2, "AttentionGradient": 5}
"""Products of queries times keys times the width of a head."""
UPDATE_BYTES = 7 * 4 + 1
"""Of a parameter: value and both moments read and written, the gradient read, a code written."""
ROUNDS = 20
"""The fastest counts."""
PEAK_LOOPS = 1_000_000
"""Some 30 milliseconds of AMX."""
TRIAD_BYTES = 3 * 2**28
"""Beyond any cache."""
PEAK_LOOP = r"""
// Multiplies and adds int8 as fast as one thread can: everything stays in registers.
#include <immintrin.h>

#include <cstdint>

#include "amx.h"

namespace {

volatile int32_t sink;

constexpr int kSums = 12;  // enough for the latency of two units

#if defined(__AVX512F__)

__attribute__((target("avx512vnni"))) int64_t vnni(int64_t rounds) {
    __m512i sums[kSums] = {}, a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, b);
        asm volatile("" : "+v"(a), "+v"(b));
    }
    for (const __m512i& sum : sums) sink = _mm512_reduce_add_epi32(sum);
    return 2 * rounds * kSums * 64;
}

int64_t amx(int64_t rounds) {
    const lsq::WholeTiles tiles;
    lsq::zero_tile<0>();
    lsq::zero_tile<1>();
    lsq::zero_tile<2>();
    lsq::zero_tile<3>();
    lsq::zero_tile<4>();
    lsq::zero_tile<5>();
    lsq::zero_tile<6>();
    lsq::zero_tile<7>();
    for (int64_t round = 0; round < rounds; ++round) {
        lsq::multiply_int8<0, 6, 7>();
        lsq::multiply_int8<1, 6, 7>();
        lsq::multiply_int8<2, 6, 7>();
        lsq::multiply_int8<3, 6, 7>();
        lsq::multiply_int8<4, 6, 7>();
        lsq::multiply_int8<5, 6, 7>();
    }
    return 2 * rounds * 6 * 16 * 16 * 64;
}

#else

__attribute__((target("avxvnni"))) int64_t vnni(int64_t rounds) {
    __m256i sums[kSums] = {}, a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(2);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (__m256i& sum : sums) sum = _mm256_dpbusd_avx_epi32(sum, a, b);
        asm volatile("" : "+x"(a), "+x"(b));
    }
    for (const __m256i& sum : sums) sink = _mm256_extract_epi32(sum, 0);
    return 2 * rounds * kSums * 32;
}

#endif

}  // namespace

// Returns how many were multiplied and added: by AMX, or by VNNI (of 512 bits where the compiler
// is told of AVX-512).
extern "C" int64_t lsq_peak(int64_t with_amx, int64_t rounds) {
#if defined(LSQ_AMX)
    if (with_amx) return amx(rounds);
#endif
    (void)with_amx;
    return vnni(rounds);
}
"""


def measured(shape: transformer.Shape, parameters: int) -> dict | None:
    """The limits of a training step here, for `common.report`; None without int8 instructions that
    lsq uses.

    Raises:
        OSError, subprocess.CalledProcessError: there is no C++ compiler, or it fails.
    """
    names = [name for name in tiles.usable() if name != tiles.PLAIN]
    if not names:
        return None
    peaks = {name: peak(name) for name in names}
    rate, bandwidth, work = max(peaks.values()), triad(), dict(work_of_step(shape, parameters))
    return {
        "operations_per_second": peaks,
        "bytes_per_second": bandwidth,
        "seconds": allowed(work, rate, bandwidth),
        "work": {
            part: dict(zip(("operations", "bytes"), map(sum, zip(*each, strict=True)), strict=True))
            for part, each in work.items()
        },
    }


def allowed(
    work: Mapping[str, list[tuple[float, float]]], rate: float, bandwidth: float
) -> dict[str, float]:
    """Seconds of each part of `work`; see `work_of_step`."""
    return {
        part: sum(max(arithmetic / rate, moved / bandwidth) for arithmetic, moved in each)
        for part, each in work.items()
    }


def work_of_step(shape: transformer.Shape, parameters: int) -> dict[str, list[tuple[float, float]]]:
    """Part -> (multiplications and additions, bytes) of its operations in an int8 step."""
    found: dict[str, list[tuple[float, float]]] = {part: [] for part in (*PARTS, UPDATE, REST)}
    for times, program in programs_of_step(shape):
        for operation in program.operations:
            found[part_of(operation.name)] += times * [(arithmetic(operation), moved(operation))]
    found[UPDATE].append((0, UPDATE_BYTES * parameters))
    return found


def programs_of_step(shape: transformer.Shape) -> Iterator[tuple[int, Program]]:
    """(how often it runs in a step, program) for full batches."""
    size = operations.Size(
        name="step",
        hidden=shape.hidden,
        feed_forward=shape.feed_forward,
        heads=shape.heads,
        vocabulary=shape.vocabulary,
        padded=-(-shape.vocabulary // 16) * 16,
        sentences=shape.sentences,
        length=shape.length,
    )
    quant = QuantConfig(backward="int8")
    config = operations.layer_config(size, quant, shape.dropout)
    mode = Mode(training=True, backward=True, backend=backend("cpu"))
    sentences = PackedSequences(rows=size.tokens, count=size.sentences)
    yield 2, programs.embedding(quant, size.tokens, operations.table(size, shape.dropout), mode)
    yield shape.layers, programs.encoder_layer(config, sentences, mode)
    yield shape.layers, programs.decoder_layer(config, sentences, sentences, mode)
    yield (
        1,
        programs.vocabulary_loss(
            quant,
            size.tokens,
            *operations.words(size),
            mode,
            padding=operations.PADDING,
            smoothing=shape.label_smoothing,
        ),
    )


def part_of(name: str) -> str:
    return next((part for part, names in PARTS.items() if name in names), REST)


def parts(seconds: Mapping[str, float], update: float, step: float) -> dict[str, float]:
    """Seconds of each part, from those of each operation, of the update and of the whole step."""
    found = Counter(dict.fromkeys((*PARTS, UPDATE, REST), 0.0))
    for name, value in seconds.items():
        found[part_of(name)] += value
    found[UPDATE] = update
    found[REST] += max(0.0, step - sum(found.values()))
    return dict(found)


def arithmetic(operation: Operation) -> float:
    """Multiplications and additions of its products; attention pairs all words of a sentence."""
    if operation.name in ATTENTION_PRODUCTS:
        heads = operation.heads
        pairs = heads.rows * heads.key_rows / heads.sentences
        return 2 * ATTENTION_PRODUCTS[operation.name] * pairs * heads.count * heads.width
    return sum(2 * m * n * k for _, m, n, k in operations.products_of(operation))


def moved(operation: Operation) -> int:
    return sum(size for _, size in operations.counted(real(operation)).values())


def real(operation: Operation) -> Operation:
    """The operation on memory that nobody has touched."""
    return operation.bind(
        functools.cache(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    )


def peak(name: str) -> float:
    """Multiplications and additions of int8 a second on all threads, by these instructions."""
    level = "x86-64-v3" if name == "avx_vnni" else "x86-64-v4"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libpeak.so")
        command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-march={level}", "-x", "c++"]
        command += [f"-I{sources.FOLDER / 'cpu'}", "-", "-o", str(library)]
        subprocess.run(command, input=PEAK_LOOP, text=True, check=True)
        run = ctypes.CDLL(str(library)).lsq_peak
    run.restype = ctypes.c_int64
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:

        def all_threads(rounds: int) -> int:
            given = [ctypes.c_int64(number) for number in (name == "amx", rounds)]
            return sum(pool.map(lambda _: run(*given), range(threads)))

        done = all_threads(PEAK_LOOPS)
        return max(done / common.seconds(lambda: all_threads(PEAK_LOOPS)) for _ in range(ROUNDS))


def triad() -> float:
    """Bytes a second of a = b + s c on large arrays; reads of a are not counted."""
    a, b, c = torch.ones(3, TRIAD_BYTES // 3 // 4)
    return max(
        TRIAD_BYTES / common.seconds(lambda: torch.add(b, c, alpha=0.5, out=a))
        for _ in range(ROUNDS)
    )
