"""Engine on every library and any number of threads, for models of many shapes: what the modules
compute."""

import random

import pytest
import torch

from lsq import gemm
from lsq.native import loader, shared_library, tiles
from lsq.serving.decode.engine import Engine
from lsq.serving.decode.model import model_of
from tests.serving.decode.models import EOS, PADDING, batch, small_model

LEVELS = [
    level
    for level, needed in loader._REQUIRED.items()
    if needed <= loader.cpu_features() and (loader._FOLDER / f"libcpu_{level}.so").exists()
]


def drawn(chance: random.Random) -> dict:
    """Options of `small_model`."""
    heads = chance.choice([1, 2, 3, 4])
    return {
        "encoder_layers": chance.choice([0, 1, 2, 3]),
        "decoder_layers": chance.choice([1, 2]),
        "words": chance.randint(20, 90),
        "heads": heads,
        "hidden": 16 * heads * chance.choice([1, 2]),
        "feed_forward": 16 * chance.randint(1, 9),
        "activation": chance.choice(["relu", "gelu"]),
        "pre_norm": chance.random() < 0.5,
        "norm": chance.choice(["layer", "layer", "rms"]),
        "tied": chance.random() < 0.5,
        "shared": chance.random() < 0.5,
        "embedding": {
            "positions": chance.choice(["sinusoidal", "learned"]),
            "layer_norm": chance.random() < 0.3,
            "scale": chance.choice([None, 1.0]),
        },
        "quant": {
            "weight_format": chance.choice(["int8", "int8", "int4"]),
            "weight_granularity": chance.choice(["channel", "tensor"]),
            "bits": chance.choice([8, 8, 6]),
        },
    }


def forget_instructions() -> None:
    """Forget the instructions of the last library, and the products that were chosen for them."""
    tiles.usable.cache_clear()
    gemm.set_files(None)


THOROUGH = [pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 40)]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1, *THOROUGH])
def test_any_shape_on_any_library(seed, monkeypatch, request):
    chance = random.Random(seed)
    options, before = drawn(chance), torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    request.addfinalizer(forget_instructions)
    lengths = [chance.randint(2, 40) for _ in range(chance.choice([1, 3, 37]))]
    source = batch(options["words"], lengths, seed)
    target = torch.randint(
        4, options["words"], (len(lengths), 5), generator=torch.Generator().manual_seed(seed)
    )
    target[:, 0] = EOS
    for level in LEVELS:
        library = shared_library.load(loader._FOLDER / f"libcpu_{level}.so", "cpu")
        monkeypatch.setattr(loader, "library", lambda library=library: library)
        forget_instructions()
        torch.set_num_threads(chance.choice([1, 2, 3]))
        module = small_model(**options)
        engine = Engine(model_of(module))
        engine.begin([row[row != PADDING] for row in source], rows=len(lengths), steps=5)
        every = torch.arange(len(lengths))
        found = torch.stack([engine.step_all(target[:, step], every) for step in range(5)], dim=1)
        expected = module(source, target).log_softmax(2)
        # where sums are added up in another order, a code that lies on a border may differ
        differences = (found - expected).abs().amax(2)
        # a code of 6 bits is four times as far from the next
        largest = 0.1 if options["quant"]["bits"] == 8 else 0.4
        assert differences.median() < 2e-5 and differences.max() < largest, (level, options)
