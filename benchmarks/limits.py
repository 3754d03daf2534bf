"""What a training step on a CPU has to do, and how fast its processor and memory could do it.

The processor's peak is measured by loops that stay in registers (peak.cpp), the memory's by a triad
as STREAM has it. Each operation is allowed as long as its multiplications take at the peak, or its
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

import lsq
from lsq import gemm
from lsq.config import QuantConfig
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Mode
from lsq.native import tiles
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
SOURCE = Path(__file__).with_name("peak.cpp")


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
    """Part -> (multiplications and additions, bytes) of each of its operations in a step with an
    int8 backward pass."""
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
            operations.words(size),
            mode,
            padding=operations.PADDING,
            smoothing=shape.label_smoothing,
        ),
    )


def part_of(name: str) -> str:
    """The part of a step that an operation of this name belongs to."""
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
    """Multiplications and additions of its products; in attention every query meets every key of
    its sentence."""
    if operation.name in ATTENTION_PRODUCTS:
        heads = operation.heads
        pairs = heads.rows * heads.key_rows / heads.sentences
        return 2 * ATTENTION_PRODUCTS[operation.name] * pairs * heads.count * heads.width
    with gemm.requested() as found:
        real(operation).cpu_scratch()
    return sum(key.arithmetic for key in found)


def moved(operation: Operation) -> int:
    """Bytes that it reads and writes."""
    return sum(size for _, size in operations.counted(real(operation)).values())


def real(operation: Operation) -> Operation:
    """The same on memory that nobody has touched."""
    return operation.bind(
        functools.cache(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    )


def peak(name: str) -> float:
    """Multiplications and additions of int8 a second, on all threads, by one of
    lsq.native.tiles.INSTRUCTIONS."""
    level = "x86-64-v3" if name == "avx_vnni" else "x86-64-v4"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libpeak.so")
        command = [
            "g++",
            "-O2",
            "-std=c++17",
            "-shared",
            "-fPIC",
            f"-march={level}",
            "-o",
            str(library),
            str(SOURCE),
        ]
        headers = Path(lsq.__file__).parent / "csrc" / "cpu"
        subprocess.run([*command, f"-I{headers}"], check=True)
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
    """Bytes a second of a = b + s c on large arrays, on all threads; what the processor reads of a
    is not counted."""
    a, b, c = torch.ones(3, TRIAD_BYTES // 3 // 4)
    return max(
        TRIAD_BYTES / common.seconds(lambda: torch.add(b, c, alpha=0.5, out=a))
        for _ in range(ROUNDS)
    )
