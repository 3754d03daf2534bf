"""Weights that train as codes in shards of FSDP2: what travels, losses, checkpoints, faults."""

import datetime
import errno
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import lsq
from lsq.dist.collectives import all_gather
from lsq.dist.fsdp import compress_reduce_scatter
from lsq.layers.trained_codes import TrainedCodes
from lsq.models import save_codes
from lsq.optim import Adam
from tests.dist.processes import ProcessFailed, run
from tests.sampling import first

WORDS, HIDDEN, ROWS = 50, 64, 60
"""Words, width and rows of a batch of `net`; 3 processes divide neither the words nor the width."""


def net(inner: int = 80, *, remainder: bool = True, **options) -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(
        nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, inner), nn.ReLU(), nn.Linear(inner, HIDDEN)
    )
    lsq.convert(made)
    lsq.train_codes(made, remainder=remainder)
    for layer in (made[1], made[3]):
        fully_shard(layer, **options)
    return fully_shard(made, **options)


def train(model: nn.Module, optimizer: Adam, steps: range, clip: float = 0.0) -> list[float]:
    """The losses of all rows, of which each process has its part."""
    rank, workers, losses = distributed.get_rank(), distributed.get_world_size(), []
    for step in steps:
        torch.manual_seed(step)
        words = torch.randint(WORDS, (ROWS,))[rank::workers]
        wanted = (words[:, None] * torch.arange(HIDDEN) / 7.0).sin()
        loss = (model(words).float() - wanted).square().mean()
        loss.backward()
        if clip:
            optimizer.clip_grad_norm(clip)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / workers
        distributed.all_reduce(mean)
        losses.append(mean.item())
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict in one piece, in process 0."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


# A language model: joined queries, keys and values, a head that shares the embedding's weight


class Counted:
    """FSDP2's own all-gather, counted."""

    def __init__(self):
        self.bytes = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.bytes += input_tensor.nbytes
        all_gather(output_tensor, input_tensor, group).wait()


def llama(codes: bool) -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=211,
            hidden_size=384,
            intermediate_size=512,
            num_hidden_layers=1,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    lsq.convert(model)
    if codes:
        lsq.train_codes(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def finetune(rank: int, codes: bool) -> tuple[list[float], list[torch.Tensor], float, set[type]]:
    """Losses, gathered codes, bytes of a value in a gather, types in the whole state dict."""
    model, counted = llama(codes), Counted()
    values = sum(one.numel() for one in model.parameters())
    compress_reduce_scatter(model)
    optimizer, losses = Adam(model.parameters(), lr=2e-4), []
    for step in range(20):
        words = (torch.arange(24) * 7 + torch.arange(8)[:, None] + 8 * rank + 11 * step) % 211
        loss = model(words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / 2
        distributed.all_reduce(mean)
        losses.append(mean.item())
    units = [one for one in model.modules() if isinstance(one, FSDPModule)]
    for one in units:
        one.reshard()
        one.set_custom_all_gather(counted)
        one.unshard()
    weights = [one for one in model.parameters() if isinstance(one, TrainedCodes)]
    gathered = [part.clone() for one in weights for part in one.own[::2]]
    for one in units:
        one.reshard()
    sent = torch.tensor(counted.bytes)
    distributed.all_reduce(sent)
    return losses, gathered, sent.item() / values, set(map(type, whole(model).values()))


@pytest.mark.thorough
def test_a_language_model_gathers_codes_and_has_the_losses_of_float_shards():
    (losses, codes, sent, kinds), (_, others, *_) = run(finetune, 2, True)
    floats, _, of_floats, _ = run(finetune, 2, False)[0]
    assert losses[-1] < losses[0] - 0.1
    assert sum(losses) / len(losses) == pytest.approx(sum(floats) / len(floats), abs=5e-4)
    assert sent <= 1.03 and of_floats >= 4
    assert len(codes) == 2 * (1 + 7) and all(map(torch.equal, codes, others))
    assert torch.Tensor in kinds and not any(issubclass(one, nn.Parameter) for one in kinds)


# Shards of unequal sizes, and other ways to shard


def trained(
    rank: int, bits: int, inside: bool, clip: float, options: dict
) -> tuple[list[float], list[torch.Tensor]]:
    """The losses, and all parameters as `codes_of` returns them."""
    if options.pop("replicas", False):
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = net(**options)
    optimizer = Adam(model.parameters(), lr=2e-3, moment_bits=bits)
    if inside:
        optimizer.step_in_backward()
    return train(model, optimizer, range(12), clip), codes_of(model)


def losses_of(*given) -> list[float]:
    return trained(*given, {})[0]


@pytest.mark.thorough
def test_rows_need_not_divide():
    """Of an embedding of 50 words and weights of 80 and 64 rows, 3 processes have unequal parts."""
    (alone,) = run(losses_of, 1, 32, False, 0.0)
    for found in run(losses_of, 3, 32, False, 0.0):
        assert found == pytest.approx(alone, abs=5e-4) and found[-1] < 0.75 * found[0]


@pytest.mark.thorough
def test_replicas_of_shards_and_bfloat16_activations_train_alike():
    (alone,) = run(losses_of, 1, 32, False, 0.0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({"replicas": True}, {"mp_policy": policy, "reshard_after_forward": False}):
        every = run(trained, 4, 32, False, 0.0, options)
        for found, codes in every:
            assert found == pytest.approx(alone, abs=2e-3)
            assert all(map(torch.equal, codes, every[0][1]))


def cast(rank: int) -> None:
    with pytest.raises(RuntimeError, match="MixedPrecisionPolicy.param_dtype=torch.bfloat16"):
        net().bfloat16()


def test_casts_of_shards_are_refused():
    run(cast, 1)


# Steps in the backward pass


def both_ways(rank: int) -> tuple[list[float], list[float], list[float]]:
    return tuple(losses_of(rank, 8, *how) for how in ((False, 0.0), (True, 0.0), (True, 0.02)))


@pytest.mark.thorough
def test_steps_in_the_backward_pass_are_those_after_it():
    both = run(both_ways, 2)
    for after, inside, clipped in both:
        assert inside == after
        assert clipped == both[0][2] and clipped[-1] > inside[-1]


def not_finite(rank: int) -> str:
    """One process has a NaN in the gradients of its own part of a batch."""
    model = net()
    optimizer = Adam(model.parameters(), moment_bits=8).step_in_backward()
    found = model(torch.arange(WORDS))
    (found * (torch.nan if rank else 1.0)).sum().backward()
    with pytest.raises(FloatingPointError) as refused:
        optimizer.step()
    return str(refused.value)


def test_all_processes_refuse_a_gradient_that_is_not_finite():
    said, other = run(not_finite, 2)
    assert said == other and "0 matrices stepped" in said


# Checkpoints


def state_of(model: nn.Module, optimizer: Adam) -> dict[str, dict]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def codes_of(model: nn.Module) -> list[torch.Tensor]:
    """All parameters, whole; those that are codes as floats of which the same codes come back."""
    return [one.full_tensor().detach() for one in model.parameters()]


def begin(rank: int, folder: str, remainder: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Train, save, go on; return the losses after the save, and what was saved."""
    model = net(remainder=remainder)
    optimizer = Adam(model.parameters(), lr=2e-3, moment_bits=8)
    train(model, optimizer, range(6))
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder)
    saved = codes_of(model)
    return train(model, optimizer, range(6, 12)), saved


def go_on(rank: int, folder: str, copy: str, remainder: bool):
    """Load, save a copy, go on."""
    model = net(remainder=remainder)
    optimizer = Adam(model.parameters(), lr=2e-3, moment_bits=8)
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    checkpoint.save(state_of(model, optimizer), checkpoint_id=copy)
    loaded = codes_of(model)
    return train(model, optimizer, range(6, 12)), loaded


@pytest.mark.parametrize("remainder", first([True, False], 0, 1))
def test_checkpoints_go_on_with_other_numbers_of_processes(tmp_path, remainder):
    first, second, third = (str(tmp_path / name) for name in "abc")
    losses, saved = run(begin, 2, first, remainder)[0]
    with_four, loaded = run(go_on, 4, first, second, remainder)[3]
    assert all(map(torch.equal, loaded, saved))
    assert with_four == pytest.approx(losses, abs=2e-3)
    with_two, loaded = run(go_on, 2, second, third, remainder)[0]
    assert all(map(torch.equal, loaded, saved))
    assert with_two == pytest.approx(losses, abs=2e-3)


def refusals(rank: int, folder: str) -> dict[str, str]:
    said, model = {}, net()
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)

    def note(name: str, error: type[Exception], function, *arguments, **options) -> None:
        with pytest.raises(error) as refused:
            function(*arguments, **options)
        said[name] = str(refused.value)

    note("order", ValueError, lsq.train_codes, model)
    note("whole", ValueError, save_codes, model, f"{folder}/whole")
    with torch.device("meta"):
        note("meta", ValueError, net)
    wider, deeper = net(96), fully_shard(nn.Sequential(net()))
    for name, other in (("shape", wider), ("name", deeper)):
        state = {"model": other.state_dict()}
        note(name, CheckpointException, checkpoint.load, state, checkpoint_id=folder)
    note("loaded", RuntimeError, wider.load_state_dict, model.state_dict())
    return said


def test_another_model_and_another_order_are_refused(tmp_path):
    (said,) = run(refusals, 1, str(tmp_path))
    assert "train_codes the model before fully_shard" in said["order"]
    assert "torch.distributed.checkpoint saves" in said["whole"]
    assert "load them before fully_shard" in said["meta"]
    assert re.search(r"saved \S*80, 64.* current: \S*96, 64.* model\.1\.weight", said["shape"])
    assert "Missing key in checkpoint state_dict: model.0.0.weight" in said["name"]
    assert "size mismatch for 1.weight" in said["loaded"]


# Faults


class Full(FileSystemWriter):
    """The disk of one process is full after the first bytes."""

    def write_data(self, plan, planner):
        if distributed.get_rank() == 1:
            Path(self.path, "__1_0.distcp").write_bytes(b"begun")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        return super().write_data(plan, planner)


def disk_full(rank: int, folder: str) -> list[str]:
    """The second checkpoint meets a full disk; the first is loaded after it."""
    model, said = net(), []
    optimizer = Adam(model.parameters(), lr=2e-3)
    train(model, optimizer, range(2))
    good, bad = f"{folder}/good", f"{folder}/bad"
    checkpoint.save(state_of(model, optimizer), checkpoint_id=good)
    saved = codes_of(model)
    train(model, optimizer, range(2))
    with pytest.raises(CheckpointException) as refused:
        checkpoint.save(state_of(model, optimizer), storage_writer=Full(bad))
    said.append(str(refused.value))
    state = state_of(model, optimizer)
    with pytest.raises(CheckpointException) as refused:
        checkpoint.load(state, checkpoint_id=bad)
    said.append(str(refused.value))
    checkpoint.load(state, checkpoint_id=good)
    assert all(map(torch.equal, codes_of(model), saved))
    return said


@pytest.mark.thorough
def test_a_full_disk_ends_the_save_everywhere_and_spares_the_checkpoint_before(tmp_path):
    for saving, loading in run(disk_full, 2, str(tmp_path)):
        assert re.search(r"RANK 1.*No space left on device", saving, re.DOTALL)
        assert "metadata is not found" in loading.lower() or ".metadata" in loading


def gather(rank: int, folder: str, killed: bool) -> None:
    """Rank 1 is gone, or answers nothing, when the others gather codes."""
    every = distributed.new_group(timeout=datetime.timedelta(seconds=2))
    model = net(mesh=DeviceMesh.from_group(every, "cpu"))
    model(torch.arange(WORDS)).sum().backward()
    if rank == 1:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        while len(os.listdir(folder)) < 2:
            time.sleep(0.1)
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="gloo"):
        model(torch.arange(WORDS))
    Path(folder, str(rank)).write_text(str(time.monotonic() - began))


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [True, False])
def test_others_end_when_a_process_is_killed_or_hangs_in_a_gather(tmp_path, killed):
    try:
        run(gather, 3, str(tmp_path), killed)
    except ProcessFailed as error:
        assert killed and "rank 1 ended without a result" in str(error)
    for rank in (0, 2):
        assert float((tmp_path / str(rank)).read_text()) < 8.0
