"""Checkpoints that are resumed, translated with and started from: damaged files, and contents that
do not fit."""

import random

import pytest
import torch
from fairseq import checkpoint_utils

from lsq.commands import cli
from tests.commands.conftest import TRAINING
from tests.fuzz import trial
from tests.fuzz.mutations import STRANGE, mutated_bytes, mutated_values
from tests.sampling import first

MODELS = ("lsq_transformer", "transformer")
TENSORS = [
    torch.zeros(()),
    torch.zeros(0),
    torch.full((3,), -1.0),
    torch.tensor([float("nan")]),
    torch.zeros(4, 4),
]
TENSORS += [
    torch.zeros(5, dtype=dtype)
    for dtype in (torch.int8, torch.bool, torch.float16, torch.complex64)
]
TENSORS += [torch.zeros(1).expand(2**33), torch.full((2, 2), 3e38)]
TENSORS += [torch.sparse_coo_tensor(size=(2, 2), check_invariants=True)]
"""Among them one that is small in a file, and 32 GiB for whoever copies it."""


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
    """What is still loaded is what was written, to the last bit: only bytes that carry nothing were
    hit."""
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


COMMON = ["--cpu", "--disable-validation", "--no-save", "--max-update", "5"]
USES = {
    "resume lsq_transformer": ["--arch", "lsq_transformer", "--restore-file", "changed.pt"],
    "resume transformer": ["--arch", "transformer", "--restore-file", "changed.pt"],
    "start from transformer": ["--arch", "lsq_transformer", "--lsq-from", "changed.pt"],
    "translate with lsq_transformer": None,
    "translate with transformer": None,
}


@pytest.mark.parametrize("use", first(USES, 2))
@trial.counts(3, 200)
def test_a_content_is_used_or_refused(tmp_path, monkeypatch, prepared, trained, use, count):
    """Files that are sound as files, of programs that write other values, types, names and
    shapes."""
    monkeypatch.chdir(tmp_path)
    sound = torch.load(trained / f"{use.split()[-1]}.pt")
    if USES[use] is None:
        command = (
            "--path changed.pt --max-tokens 300 --gen-subset test --beam 2 --max-len-b 5"
            " --num-workers 0 --cpu"
        )
        command = ["generate", str(prepared.data), *command.split()]
    else:
        command = ["train", str(prepared.data), *TRAINING, *COMMON, *USES[use]]

    def attempt(chance: random.Random):
        changed = dict(sound)
        part = chance.choice(list(sound))
        if chance.random() < 0.1:
            del changed[part]
        else:
            changed = changed | mutated_values({part: sound[part]}, chance, [*STRANGE, *TENSORS])
        torch.save(changed, "changed.pt")
        found = trial.outcome(lambda: cli.main(command), tmp_path)
        return trial.Outcome(fault=f"{part}: {found.fault}") if found.fault else found

    worked, refused = trial.survey(use, count, attempt)
    assert refused > 0, (worked, refused)
