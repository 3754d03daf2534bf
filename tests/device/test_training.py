"""Trainings on the test device: what they give, and what a step waits for and launches there."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from torch import nn

from lsq.fairseq.model import LSQTransformerModel, Paddings
from lsq.layers import TransformerLanguageModel
from lsq.optim import Adam
from lsq.run.backends import backend
from tests.device.standin import PLACE, moved
from tests.device.watch import Record, watched
from tests.fairseq.conftest import SHORT, TINY, WORDS
from tests.layers import toy
from tests.layers.shapes import config_of
from tests.sampling import first

OPTIONS = {"backward": "int8", "clip_init": "fixed"}
"""Nothing is calibrated."""


class LanguageModel(TransformerLanguageModel):
    """Called like a Translator."""

    def __init__(self):
        config = config_of(dropout=0.1, norm="rms", pre_norm=True, **OPTIONS)
        super().__init__(toy.VOCABULARY, config, layers=2, padding_idx=toy.PADDING)

    def forward(self, _, tokens):
        return super().forward(tokens, tokens.roll(-1, 1), 0.1)[0]


class Plugin(nn.Module):
    """fairseq's model with lsq's layers, on ten letters; told where the padding is, as batches of
    it are."""

    def __init__(self):
        super().__init__()
        words = Dictionary()
        for letter in WORDS:
            words.add_symbol(letter)
        args = options.parse_args_and_arch(
            options.get_training_parser(), ["no corpus", *TINY, *SHORT]
        )
        args.lsq_clip_init = "fixed"
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        self.model = LSQTransformerModel.build_model(args, task)

    def forward(self, source, target, paddings):
        lengths = torch.full((len(source),), source.shape[1], device=source.device)
        given = {"target": target.clamp(max=12), "label_smoothing": 0.1, "paddings": paddings}
        return self.model(source.clamp(max=12), lengths, given["target"].roll(1, 1), **given)[0]


TORCHS = partial(torch.optim.Adam, fused=True)
MODELS = {
    "translator": lambda: toy.Translator(**OPTIONS),
    "language model": LanguageModel,
    "plugin": Plugin,
}


def train(model, place: torch.device, steps: int, by=TORCHS) -> tuple[list[float], Record]:
    """Losses of a training, and what its last step did on the test device."""
    torch.manual_seed(5)
    optimizer = by(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        source, target = toy.batch(3, 9, 7, seed=2 * step + 1)
        rest = (
            [Paddings(source == toy.PADDING, target == toy.PADDING)]
            if isinstance(model, Plugin)
            else []
        )
        if place == PLACE:
            source, target = (
                tokens.pin_memory().to(place, non_blocking=True) for tokens in (source, target)
            )
        with watched() as record:
            loss = model(source, target, *rest)
            loss.backward()
            if by is not Adam:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, record


@pytest.mark.parametrize("name", first(["language model", "translator", "plugin"], 0, 1))
def test_a_training_is_the_emulators_bit_by_bit(name):
    torch.manual_seed(1)
    there = MODELS[name]()
    here = copy.deepcopy(there)
    for module in here.modules():
        if hasattr(module, "backend"):
            module.backend = backend("emulated")
    wanted, _ = train(here, torch.device("cpu"), 3)
    found, _ = train(moved(there), PLACE, 3)
    assert found == wanted
    for (path, tensor), expected in zip(
        there.state_dict().items(), here.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor.cpu(), expected), path


MOST = {"translator": (6, 127), "language model": (1, 63), "plugin": (0, 66)}
"""(waits, launches of PyTorch) in a step that does not calibrate.

Each Packing of a mask on the device waits for it.
"""


@pytest.mark.parametrize("name", first(["language model", "translator", "plugin"], 0, 2))
def test_waits_and_launches_of_a_step(name):
    torch.manual_seed(1)
    _, record = train(moved(MODELS[name]()), PLACE, 3)
    waits, launches = MOST[name]
    assert len(record.waits) <= waits, record.table(record.waits)
    assert len(record.launches) <= launches, record.table(record.launches)


@pytest.mark.thorough
def test_a_step_with_lsqs_adam_waits_for_nothing():
    torch.manual_seed(1)
    losses, record = train(moved(Plugin()), PLACE, 3, by=Adam)
    assert losses[0] > losses[-1]
    assert not record.waits, record.table(record.waits)
    assert len(record.launches) <= 27, record.table(record.launches)
