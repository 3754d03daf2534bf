"""Converted models in several processes: DDP, and FSDP2 with checkpoints of its shards."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lsq
from tests.constants import quant_with
from tests.dist.processes import run
from tests.models import zoo
from tests.models.models import Model, loss_of, model, tokens

QUANT = quant_with(backward="float", clip_step=0.01, calibration_passes=2)
STEPS = 3


def converted(seed: int = 1) -> Model:
    made = model(seed)
    lsq.convert(made, QUANT)
    return made


def trained(model: nn.Module, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        loss_of(model(tokens(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
        for name, one in model.state_dict().items()
    }


def alike(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(
            found[name], one, rtol=1e-4, atol=1e-4, msg=lambda text, at=name: f"{at}: {text}"
        )


LLAMAS = zoo.right_padded((9, 9, 9))


def llama(seed: int = 1) -> nn.Module:
    return zoo.fused(zoo.made("qwen3", seed=seed), QUANT)


def trained_llama(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        model(**LLAMAS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel(rank: int, fused: bool) -> dict[str, torch.Tensor]:
    made = llama() if fused else converted()
    if not fused:
        made.score.requires_grad_(False)  # which no batch reaches
    (trained_llama if fused else trained)(DistributedDataParallel(made))
    return whole(made)


@pytest.mark.thorough
@pytest.mark.parametrize("fused", [False, True])
def test_distributed_data_parallel(fused):
    expected = llama() if fused else converted()
    (trained_llama if fused else trained)(expected)
    for found in run(parallel, 2, fused):
        alike(found, whole(expected))


def shard(model: nn.Module, **options) -> nn.Module:
    for block in model.blocks if isinstance(model, Model) else model.model.layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def sharded(rank: int, folder: str, fused: bool) -> list[dict[str, torch.Tensor]]:
    """States of a model that has trained, of one that loads it, and of both a step later."""
    make, train = (llama, trained_llama) if fused else (converted, trained)
    made, other = shard(make()), shard(make(5))
    train(made)
    checkpoint.save(get_model_state_dict(made), checkpoint_id=folder)
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    found = [whole(made), whole(other)]
    for one in (made, other):
        train(one, 1)
        found.append(whole(one))
    distributed.barrier()
    return found


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_fully_shard_and_a_checkpoint_of_its_shards(fused, tmp_path):
    make, train = (llama, trained_llama) if fused else (converted, trained)
    expected = make()
    train(expected)
    before = whole(expected)
    train(expected, 1)
    for first, loaded, after, after_loaded in run(sharded, 2, str(tmp_path / "checkpoint"), fused):
        alike(first, before)
        alike(loaded, first)
        alike(after, whole(expected))
        alike(after_loaded, after)


def from_meta(rank: int) -> list[dict[str, torch.Tensor]]:
    with torch.device("meta"):
        made = Model()
        lsq.convert(made, QUANT)
        # `to_empty` unties it in any case
        made.head.weight = nn.Parameter(torch.empty_like(made.head.weight))
    shard(made)
    made.to_empty(device="cpu")
    set_model_state_dict(
        made, model().state_dict(), options=StateDictOptions(full_state_dict=True, strict=False)
    )
    trained(made)
    return whole(made)


@pytest.mark.thorough
def test_fully_shard_on_the_meta_device():
    expected = converted()
    expected.head.weight = nn.Parameter(expected.words.weight.detach().clone())
    trained(expected)
    for found in run(from_meta, 2):
        alike(found, whole(expected))


def mixed(rank: int) -> float:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made = shard(converted(), mp_policy=policy)
    trained(made, 1)
    before = loss_of(made(tokens())).item()
    trained(made, 12)
    assert all(one.dtype == torch.float32 for one in made.parameters())
    return before - loss_of(made(tokens())).item()


@pytest.mark.thorough
def test_mixed_precision_of_fully_shard():
    assert min(run(mixed, 2)) > 0.3


def refused(rank: int) -> list[str]:
    messages = []
    for wrapped in (DistributedDataParallel(model()), shard(model())):
        for change in (lsq.convert, lsq.revert):
            with pytest.raises(ValueError) as raised:
                change(wrapped)
            messages.append(str(raised.value))
    return messages


def test_wrapped_models_are_refused():
    (messages,) = run(refused, 1)
    assert messages[0].startswith(
        "the model is wrapped in DistributedDataParallel; convert what is inside"
    )
    assert messages[1].endswith("revert what is inside, before it is wrapped")
    assert all("are shards; " in message for message in messages[2:])
