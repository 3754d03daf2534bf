"""Passes of tiny layers, whose time is that of the host: what bench_host.py measures, in a process
of its own.

`python host_work.py LAYERS WORDS` reads lines "backend: work", does that once, and writes the
seconds of one thread of the processor that it took.
"""

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import stub
import torch

from lsq import emulator
from lsq.config import LayerConfig, QuantConfig
from lsq.gemm.cublaslt import Products, first_candidate
from lsq.layers import TransformerDecoderLayer, TransformerEncoderLayer
from lsq.layers.memory import plan_memory
from lsq.native.device import Device
from lsq.native.runtime import Driver
from lsq.run.backends import CUDA, Backend, backend

HIDDEN, SENTENCES = 16, 2
CONFIG = LayerConfig(
    hidden=HIDDEN,
    heads=2,
    feed_forward=32,
    dropout=0.1,
    quant=QuantConfig(backward="int8", clip_init="fixed"),
)


def target(name: str) -> Backend:
    """Where layers run: "cpu", or "cuda" on a driver whose launches do nothing; its products are
    the emulator's."""
    if name == "cpu":
        return backend("cpu")
    driver, place = Driver(str(stub.build(Path(tempfile.mkdtemp())))), torch.device("cpu")
    products = Products(
        place,
        current=driver.current,
        library=str(emulator.build_products()),
        choose=first_candidate,
    )
    return CUDA(
        Device(
            name="stub",
            driver=driver,
            compile=lambda kernel: b"code",
            products=products,
            place=place,
        )
    )


def encoder(where: Backend, layers: int) -> torch.nn.Sequential:
    """Layers one after another."""
    stack = torch.nn.Sequential(*(TransformerEncoderLayer(CONFIG) for _ in range(layers)))
    for layer in stack:
        layer.backend = where
    return stack


def training(where: Backend, layers: int, words: int, *, planned: bool) -> Callable[[], None]:
    """A forward and a backward pass."""
    stack, x = encoder(where, layers), torch.randn(words, SENTENCES, HIDDEN)
    if planned:
        plan_memory(stack, lambda: stack(x).sum())

    def run() -> None:
        stack(x).sum().backward()
        stack.zero_grad()

    return run


def evaluation(where: Backend, layers: int, words: int, *, growing: bool) -> Callable[[], None]:
    """A forward pass; if `growing`, of sentences one word longer each time."""
    stack, longest = encoder(where, layers).eval(), torch.randn(4096, SENTENCES, HIDDEN)

    def run() -> None:
        nonlocal words
        words += growing
        with torch.no_grad():
            stack(longest[:words])

    return run


def decoding(where: Backend, layers: int, words: int) -> Callable[[], None]:
    """Sentences word by word, with a memory that has padding."""
    stack = [TransformerDecoderLayer(CONFIG).eval() for _ in range(layers)]
    for layer in stack:
        layer.backend = where
    memory, padding = (
        torch.randn(words, SENTENCES, HIDDEN),
        torch.arange(words) >= torch.tensor([[words], [words - 1]]),
    )

    def run() -> None:
        states: list[dict] = [{} for _ in stack]
        x = torch.ones(1, SENTENCES, HIDDEN)
        with torch.no_grad():
            for _ in range(words):
                for layer, state in zip(stack, states, strict=True):
                    x = layer(x, memory, padding, state=state)

    return run


WORK = {
    "training, planned memory": lambda *sizes: training(*sizes, planned=True),
    "training, fresh memory": lambda *sizes: training(*sizes, planned=False),
    "evaluation": lambda *sizes: evaluation(*sizes, growing=False),
    "evaluation, new lengths": lambda *sizes: evaluation(*sizes, growing=True),
    "decoding": decoding,
}


def main() -> None:
    layers, words = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    where = functools.cache(target)

    @functools.cache
    def made(name: str, work: str) -> Callable[[], None]:
        return WORK[work](where(name), layers, words)

    for line in sys.stdin:
        run = made(*line.rstrip("\n").split(": "))
        began = time.process_time()
        run()
        print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main()
