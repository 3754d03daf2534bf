"""What only a GPU can show of launch lists: bits that never change, graphs, streams, memory that runs out."""

import gc
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lsq.ops import device
from lsq.program import layers
from tests.layers.shapes import config_of
from tests.program.replay import replay_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu


def layer(**options):
    config = config_of(**{"backward": "int8", "dropout": 0.1} | options)
    return layers.decoder_layer(config, 9, 41, 37, True, True, True, True)


def snapshot(replayed):
    return {name: tensor.clone() for name, tensor in replayed.results().items()}


def same(first, second):
    return all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hundred_runs_give_the_same_bits(dtype):
    replayed = replay_of(layer(), device.gpu(), dtype)
    replayed.work.run()
    torch.cuda.synchronize()
    first = snapshot(replayed)
    for _ in range(99):
        for tensor in replayed.program.gradients:
            if tensor is not None:
                replayed.placed[tensor].fill_(85)
        replayed.work.run()
        torch.cuda.synchronize()
        assert same(first, snapshot(replayed))


def test_a_captured_list_replays_on_other_inputs():
    program = layers.encoder_layer(config_of(backward="int8", dropout=0.1), 9, 41, True, True, True)
    key = next(tensor for tensor in program.inputs if tensor.name == "random_key")
    gradient = program.output_gradients[0]
    target = device.gpu()
    placed = replay_of(program, target).placed
    replayed = replay_of(program, target)
    slots = {"gradient": replayed.placed[gradient], "key": replayed.placed[key]}
    work = target.list(replayed.work.entries, slots=slots)
    work.run(**slots)  # compiles, loads and warms up before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run()
    for seed in (1, 2):
        other = {"gradient": torch.randn_like(placed[gradient]), "key": torch.tensor([seed], device=target.place)}
        other = {name: tensor.clone() for name, tensor in other.items()}
        work.run(**other)
        torch.cuda.synchronize()
        eager = snapshot(replayed)
        work.store(**slots)
        graph.replay()
        work.store(**other)
        graph.replay()
        torch.cuda.synchronize()
        assert same(eager, snapshot(replayed))


def test_two_streams_at_once():
    lists = [replay_of(layer(), device.gpu(), torch.bfloat16, seed) for seed in (0, 1)]
    expected = []
    for replayed in lists:
        replayed.work.run()
        torch.cuda.synchronize()
        expected.append(snapshot(replayed))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(50):
        for stream, replayed in zip(streams, lists, strict=True):
            with torch.cuda.stream(stream):
                replayed.work.run()
    torch.cuda.synchronize()
    assert all(same(wanted, snapshot(replayed)) for wanted, replayed in zip(expected, lists, strict=True))


def test_memory_that_runs_out_is_said_and_nothing_leaks():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = config_of(hidden=1024, inner=4096, heads=16)
    program = layers.feed_forward(config, 2**20, True, True)
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
            replay_of(program, device.gpu(), torch.bfloat16)
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
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-k", "cuda and 41", "tests/ops"]
    command = [program, f"--tool={tool}", "--error-exitcode=9", "--target-processes=all", *tests]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]
