"""What only a GPU can show of whole programs: bits that never change, graphs, streams, memory that
runs out."""

import gc
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.program.samples import border_tensors
from lsq.program.tensor import VirtualTensor
from lsq.run.cuda import CUDA, gpu
from tests.layers.examples import mode_on
from tests.layers.shapes import config_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu
LONG, SOURCE = PackedSequences(rows=350, count=9), PackedSequences(rows=300, count=9)


class Prepared:
    """Both passes of a program as one list of launches, on random inputs; every tensor has memory
    of its own."""

    def __init__(self, build, dtype: torch.dtype = torch.float32, seed: int = 0):
        where = CUDA(gpu(), activations=dtype)
        self.program = build(mode_on(where))
        self.placed = {
            tensor: one.to(where.device)
            for tensor, one in border_tensors(self.program, seed).items()
        }

        def place(tensor: VirtualTensor) -> torch.Tensor:
            if tensor not in self.placed:
                self.placed[tensor] = where.allocate(tensor.shape, tensor.dtype)
            return self.placed[tensor]

        calls = zip(self.program.operations, self.program.scratch, strict=True)
        self.run = where.prepare(
            [(one.bind(place), [*map(place, scratch)]) for one, scratch in calls]
        )

    def results(self) -> dict[str, torch.Tensor]:
        """Copies of outputs and gradients by name, once all is done."""
        torch.cuda.synchronize()
        wanted = (*self.program.outputs, *self.program.gradients)
        return {tensor.name: self.placed[tensor].clone() for tensor in wanted}


def decoder(mode):
    return programs.decoder_layer(config_of(backward="int8", dropout=0.1), LONG, SOURCE, mode)


def same(first, second):
    return all(
        torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hundred_runs_give_the_same_bits(dtype):
    prepared = Prepared(decoder, dtype)
    prepared.run()
    first = prepared.results()
    for _ in range(99):
        for tensor in prepared.program.gradients:
            prepared.placed[tensor].fill_(85)
        prepared.run()
        assert same(first, prepared.results())


def test_a_captured_list_replays_on_other_inputs():
    prepared = Prepared(decoder)
    changing = [
        prepared.placed[tensor]
        for tensor in (*prepared.program.inputs, *prepared.program.output_gradients)
        if tensor.name in ("x", "random_key", "d_" + prepared.program.outputs[0].name)
    ]
    prepared.run()  # compiles, loads and warms up before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.run()
    for seed in (1, 2):
        for tensor in changing:
            tensor.copy_(
                torch.randn_like(tensor)
                if tensor.is_floating_point()
                else torch.full_like(tensor, seed)
            )
        prepared.run()
        eager = prepared.results()
        for tensor in prepared.program.gradients:
            prepared.placed[tensor].fill_(85)
        graph.replay()
        assert same(eager, prepared.results())


def test_two_streams_at_once():
    both = [Prepared(decoder, torch.bfloat16, seed) for seed in (0, 1)]
    expected = []
    for prepared in both:
        prepared.run()
        expected.append(prepared.results())
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(50):
        for stream, prepared in zip(streams, both, strict=True):
            with torch.cuda.stream(stream):
                prepared.run()
    assert all(
        same(wanted, prepared.results()) for wanted, prepared in zip(expected, both, strict=True)
    )


def test_memory_that_runs_out_is_said_and_nothing_leaks():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = config_of(hidden=1024, inner=4096, heads=16)
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
            Prepared(lambda mode: programs.feed_forward(config, 2**20, mode), torch.bfloat16)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()  # the exception kept what was made before it
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(600)
def test_compute_sanitizer_finds_nothing(tool):
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer, which comes with CUDA's toolkit")
    tests = [sys.executable, *"-m pytest -q -x -m gpu -k".split(), "cuda and 41", "tests/ops"]
    command = [program, f"--tool={tool}", "--error-exitcode=9", "--target-processes=all", *tests]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]
