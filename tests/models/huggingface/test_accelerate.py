"""accelerate's loop around a converted model, in one process."""

import pytest
import torch

from tests.models.huggingface.trainings import converted, data, same_states

from accelerate import Accelerator  # isort: skip  (after torchaudio is out of the way)
from accelerate.state import AcceleratorState  # isort: skip


@pytest.fixture
def accelerate():
    yield Accelerator
    AcceleratorState._reset_state(reset_partial_state=True)


def steps(accelerator, model, optimizer, count: int) -> list[float]:
    found = []
    for example in data("gpt2", count):
        words = example["input_ids"][None]
        with accelerator.accumulate(model):
            loss = model(input_ids=words, labels=words).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_goes_on_bit_for_bit(precision, tmp_path, accelerate):
    accelerator = accelerate(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = converted("gpt2")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = steps(accelerator, model, optimizer, 12)
    assert found[-1] < found[0] - 0.3
    accelerator.save_state(tmp_path)
    expected = steps(accelerator, model, optimizer, 4)
    other = converted("gpt2", seed=9)
    other, optimizer = accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    accelerator._models, accelerator._optimizers = (
        accelerator._models[1:],
        accelerator._optimizers[1:],
    )
    accelerator.load_state(tmp_path)
    assert steps(accelerator, other, optimizer, 4) == expected
    assert same_states(accelerator.unwrap_model(other), accelerator.unwrap_model(model))
