"""Trainings on the test device: what they give, and what a step waits for and launches there."""

import copy

import pytest
import torch

from lsq.backends import backend
from lsq.layers import TransformerLanguageModel
from tests.device.standin import PLACE, moved
from tests.device.watch import Record, watched
from tests.layers import toy
from tests.layers.shapes import config_of

OPTIONS = {"backward": "int8", "activation_init": "fixed", "weight_init": "fixed", "calibration_passes": 0}
"""Nothing is calibrated."""


class LanguageModel(TransformerLanguageModel):
    """Called like a Translator."""

    def __init__(self):
        config = config_of(dropout=0.1, norm="rms", pre_norm=True, **OPTIONS)
        super().__init__(toy.VOCABULARY, config, layers=2, padding_idx=toy.PADDING)

    def forward(self, _, tokens):
        return super().forward(tokens, tokens.roll(-1, 1), 0.1)[0]


MODELS = {"translator": lambda: toy.Translator(**OPTIONS), "language model": LanguageModel}


def train(model, place: torch.device, steps: int) -> tuple[list[float], Record]:
    """Losses of a training, and what its last step did on the test device."""
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    losses = []
    for step in range(steps):
        source, target = toy.batch(3, 9, 7, seed=2 * step + 1)
        if place == PLACE:
            source, target = (tokens.pin_memory().to(place, non_blocking=True) for tokens in (source, target))
        with watched() as record:
            loss = model(source, target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, record


@pytest.mark.parametrize("name", MODELS)
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
    for (path, tensor), expected in zip(there.state_dict().items(), here.state_dict().values(), strict=True):
        assert torch.equal(tensor.cpu(), expected), path


MOST = {"translator": (37, 467), "language model": (15, 187)}
"""(waits, launches of PyTorch) in a step that does not calibrate."""


@pytest.mark.parametrize("name", MODELS)
def test_waits_and_launches_of_a_step(name):
    torch.manual_seed(1)
    _, record = train(moved(MODELS[name]()), PLACE, 3)
    waits, launches = MOST[name]
    assert len(record.waits) <= waits, record.table(record.waits)
    assert len(record.launches) <= launches, record.table(record.launches)
