"""--lsq-sparsity: masks over a training in fairseq, between workers, in checkpoints and in what is
exported."""

import pytest
import torch

from lsq.fairseq import checkpoint, float_checkpoint
from lsq.models.sparsity import sparsity_of
from lsq.quant import unpack_bits
from lsq.serving.decoding_model import model_of
from tests.fairseq.comparison import assert_equal_states
from tests.fairseq.conftest import SHORT, TINY
from tests.fairseq.two_workers import train_by_two

WEIGHT = "decoder.layers.1.encoder_attn.key_value_weight"


def mask(state: dict[str, torch.Tensor], name: str = WEIGHT) -> torch.Tensor:
    weight = state[name]
    return unpack_bits(state[name + "_kept"].byte(), weight.numel()).view(weight.shape)


def two_of_four(kept: torch.Tensor) -> bool:
    return bool((kept.unflatten(1, (-1, 4)).sum(2) == 2).all())


@pytest.mark.thorough
def test_masks_follow_the_schedule(train, tmp_path):
    """Dense, sparse, dense from zeros."""
    plain = train(tmp_path / "plain", "--max-update 2")["model"]
    found = [
        train(tmp_path, f"--max-update {n} --lsq-sparsity 2:4,every=2,begin=2,end=5")
        for n in (1, 2, 4, 5)
    ]
    first, second, fourth, last = (one["model"] for one in found)
    assert mask(first).all() and mask(last).all()
    assert two_of_four(mask(second)) and two_of_four(mask(fourth))
    assert torch.equal(second[WEIGHT], plain[WEIGHT]) and (fourth[WEIGHT] != 0).all()
    zeros = last[WEIGHT] == 0
    assert zeros.float().mean() == 0.5
    kept = second[WEIGHT].abs().unflatten(1, (-1, 4)).topk(2, dim=2).values.sum()
    torch.testing.assert_close((second[WEIGHT].abs() * mask(second)).sum(), kept)
    assert not any("output_projection" in name for name in first if name.endswith(checkpoint.MASK))


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_a_dense_training_goes_on_sparse(train, build, tmp_path, mode):
    dense = train(tmp_path / "dense", f"--max-update 2 --lsq-mode {mode}")["model"]
    last = tmp_path / "dense" / "checkpoint_last.pt"
    given = f"--lsq-mode {mode} --lsq-sparsity 2:4,every=0"
    sparse = train(tmp_path / "sparse", f"--finetune-from-model {last} --max-update 1 {given}")[
        "model"
    ]
    kept, largest = mask(sparse), dense[WEIGHT].abs().unflatten(1, (-1, 4))
    assert two_of_four(kept)
    assert (largest * kept.unflatten(1, (-1, 4))).sum(2).equal(largest.topk(2, 2).values.sum(2))
    _, model = build(given)
    model.load_state_dict(sparse)
    values = model.decoder.layers[1].values_of("encoder_attn.key_value_weight")
    assert torch.equal(values != 0, kept)
    with pytest.raises(
        ValueError, match="the checkpoint is of a sparse model .*add --lsq-sparsity 2:4"
    ):
        build(f"--lsq-mode {mode}")[1].load_state_dict(sparse)


def test_a_sparse_float_training_goes_on_in_int8(train, build, tmp_path):
    """What masks leave are the weights, dense or pruned alike."""
    given = "--max-update 1 --lsq-sparsity 2:4,every=0"
    sparse = train(tmp_path / "float", f"--lsq-mode float {given}")["model"]
    last = tmp_path / "float" / "checkpoint_last.pt"
    rounded = train(tmp_path / "int8", f"--lsq-from {last} {given} --lr 0")["model"]
    assert torch.equal(mask(rounded), mask(sparse))
    _, dense = build("")
    checkpoint.load_float(dense, sparse)
    kept = sparse[WEIGHT] * mask(sparse)
    assert torch.equal(dense.state_dict()[WEIGHT], kept) and (kept == 0).float().mean() == 0.5
    assert not any(name.endswith(checkpoint.MASK) for name in dense.state_dict())
    with pytest.raises(ValueError, match="was given an int8 model's checkpoint"):
        checkpoint.load_float(dense, rounded)


@pytest.mark.thorough
def test_workers_have_the_same_masks(toy, tmp_path):
    given = f"""
        --max-update 4 --lsq-sparsity 2:4,every=2,decay=1 --clip-norm 0.1 --optimizer lsq_adam
        --save-dir {tmp_path}
    """
    _, (one, other) = train_by_two([str(toy), *TINY, *SHORT, *given.split()])
    assert two_of_four(mask(one))
    assert_equal_states(one, other)


def test_translating_and_exporting_reads_what_masks_leave(train, build, tmp_path):
    train(tmp_path, "--max-update 2 --lsq-sparsity 2:4")
    state = torch.load(tmp_path / "checkpoint_last.pt")
    _, model = build("--lsq-sparsity 2:4")
    model.load_state_dict(state["model"])
    codes = model_of(model.eval()).tensors[WEIGHT + ".codes"]
    assert (codes.unflatten(1, (-1, 4)) != 0).sum(2).max() == 2
    floats = {mode: None for mode in ("int8", "float")}
    for mode in floats:
        _, model = build(f"--lsq-sparsity 2:4 --lsq-mode {mode}")
        if mode == "int8":
            model.load_state_dict(state["model"])
        else:
            sparsity_of(model)
        found = float_checkpoint.floats(model.eval())
        assert not any(name.endswith(checkpoint.MASK) for name in found)
        groups = found["decoder.layers.1.encoder_attn.k_proj.weight"].unflatten(1, (-1, 4))
        assert (groups != 0).sum(2).max() == 2
