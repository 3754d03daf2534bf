"""Damaged checkpoints."""

import pytest
import torch
from fairseq import checkpoint_utils

from tests.fuzz import trial
from tests.fuzz.mutations import mutated_bytes

MODELS = ("lsq_transformer", "transformer")


def same(one: object, other: object) -> bool:
    """Whether two states hold the same values of the same types."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


@trial.quick_counts
@pytest.mark.parametrize("model", MODELS)
def test_no_damage_to_a_file_is_loaded_in_silence(tmp_path, trained, model, count):
    """What is still loaded is what was written, to the last bit."""
    content = (trained / f"{model}.pt").read_bytes()
    path = tmp_path / "checkpoint_last.pt"
    path.write_bytes(content)
    sound = checkpoint_utils.load_checkpoint_to_cpu(str(path))

    def attempt(chance):
        path.write_bytes(mutated_bytes(content, chance))
        found = trial.outcome(lambda: checkpoint_utils.load_checkpoint_to_cpu(str(path)), tmp_path)
        if found.refusal is None and not found.fault and not same(found.result, sound):
            return trial.Outcome(fault="other content was loaded in silence")
        return found

    worked, refused = trial.survey(f"file of {model}", count, attempt)
    assert refused > 0.8 * count, (worked, refused)
