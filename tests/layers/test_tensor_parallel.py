"""Converted linear layers split by torch's `parallelize_module`, beside whole ones."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lsq
from lsq import QuantConfig
from lsq.dist import roll_call
from lsq.dist.roll_call import RankLost
from lsq.optim import Adam
from tests.dist.processes import ProcessFailed, run

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
STEPS = 12


def model(converted: bool = True, inner: int = 96, **options) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, inner), nn.ReLU(), nn.Linear(inner, 48))
    if converted:
        lsq.convert(layers, QuantConfig(**options), minimum_width=32)
    return layers


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(step))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def training(net: nn.Module, make) -> dict:
    """Outputs of the first pass, gradients of the first step, losses, state, an evaluation."""
    found = {"losses": []}
    optimizer = make(net.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = batch(step).requires_grad_()
        y = net(x)
        loss = (y - x[..., :48].detach()).square().mean()
        loss.backward()
        if step == 0:
            found["y"], found["x"] = y.detach(), x.grad
            for name, one in net.named_parameters():
                if one.grad is not None:
                    found[name + ".grad"] = whole(one.grad)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    found["state"] = {name: whole(one) for name, one in net.state_dict().items()}
    with torch.no_grad():
        found["evaluated"] = net.eval()(batch(100)).clone()  # waits for the sum
    return found


def split(rank: int, converted: bool, make) -> dict:
    mesh = init_device_mesh("cpu", (2,))
    return training(parallelize_module(model(converted), mesh, PLAN), make)


@pytest.mark.parametrize("make", [torch.optim.AdamW, Adam])
def test_parts_train_as_the_whole_layers_do(make):
    results, wanted = run(split, 2, True, make), training(model(), make)
    floats = training(model(converted=False), make)
    for name, one in wanted.items():
        if not isinstance(one, torch.Tensor):
            continue
        rounding = (one - floats[name]).norm()
        for found in results:
            assert torch.equal(found[name], results[0][name]), name
            assert (found[name] - one).norm() <= 1.5 * rounding, name
    torch.testing.assert_close(
        torch.tensor(results[0]["losses"]), torch.tensor(wanted["losses"]), rtol=0.02, atol=0
    )
    for name, one in wanted["state"].items():
        for found in results:
            assert found["state"].keys() == wanted["state"].keys()
            assert torch.equal(found["state"][name], results[0]["state"][name]), name
        if "clip" in name:
            torch.testing.assert_close(results[0]["state"][name], one, rtol=0.05, atol=0)
    assert wanted["state"]["2.passes"] == results[0]["state"]["2.passes"] == STEPS


def loaded(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of a split model in eval mode, and of one that loads its whole state."""
    mesh = init_device_mesh("cpu", (2,))
    net = parallelize_module(model(), mesh, PLAN)
    training(net, torch.optim.AdamW)
    state = {name: whole(one) for name, one in net.state_dict().items()}
    other = model()
    other.load_state_dict(state)
    again = parallelize_module(other, mesh, PLAN)
    with torch.no_grad():
        return net.eval()(batch(7)).clone(), again.eval()(batch(7)).clone()


def test_a_split_model_loads_clips_of_a_whole_one():
    for first, again in run(loaded, 2):
        assert torch.equal(first, again)


def refused(rank: int) -> list[str]:
    mesh, said = init_device_mesh("cpu", (2,)), []
    x = batch(0)
    encoder = nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True)
    lsq.convert(encoder, minimum_width=32)
    for net, plan, given in (
        (model(clips="learned"), PLAN, x),
        (model(inner=80), PLAN, x),
        (model()[0], {}, distribute_tensor(x, mesh, [Replicate()])),
        (encoder, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}, x),
    ):
        try:
            parallelize_module(net, mesh, plan)(given)
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_split_is_refused():
    for said in run(refused, 2):
        assert len(said) == 4, said
        assert 'QuantConfig(clips="absmax")' in said[0]
        assert "has 40 outputs and 64 inputs of a QuantizedLinear [80, 64]" in said[1]
        assert "weight [96, 64] as a whole tensor got an input [3, 7, 64] as (Replicate" in said[2]
        assert "split linear1 of a FusedTransformerEncoderLayer" in said[3]
        assert "lsq.convert(model, fused=False)" in said[3]


def of_codes(rank: int, keep) -> str:
    net = model()
    net.requires_grad_(keep is lsq.train_codes)
    keep(net)
    with pytest.raises(ValueError) as refused:
        parallelize_module(net, init_device_mesh("cpu", (2,)), PLAN)
    return str(refused.value)


@pytest.mark.parametrize("keep", [lsq.train_codes, lsq.freeze])
def test_weights_that_are_codes_are_not_split(keep):
    for said in run(of_codes, 2, keep):
        assert "split the weight of this QuantizedLinear, which is kept as codes alone" in said
        assert "leave this layer out of the plan" in said


def dying(rank: int, folder: str) -> None:
    """Rank 1 is killed after 3 steps."""
    roll_call.PATIENCE_S = 1.0
    roll_call.register()
    net = parallelize_module(model(), init_device_mesh("cpu", (2,)), PLAN)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with pytest.raises(RankLost) as lost, roll_call.naming_the_lost():
        for step in range(6):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            net(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    Path(folder, "said").write_text(f"{step}: {lost.value}")


@pytest.mark.thorough
def test_a_killed_process_is_named(tmp_path):
    with pytest.raises(ProcessFailed, match="rank 1 ended without a result"):
        run(dying, 2, str(tmp_path))
    said = (tmp_path / "said").read_text()
    assert re.match(r"3: rank 1 \(of 2, host .*\) no longer answers: gloo", said), said


def llama(rank: int, split: bool) -> list[float]:
    """Losses of a Llama whose attention is split by heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    net = LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=256))
    lsq.convert(net, fused=False, minimum_width=32)
    if split:
        by_outputs = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"
        plan = {f"model.layers.*.{name}": ColwiseParallel() for name in by_outputs.split()}
        plan |= {
            f"model.layers.*.{name}": RowwiseParallel()
            for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    words = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-3), []
    for _ in range(8):
        loss = net(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.thorough
def test_linear_layers_of_a_llama_split_by_heads():
    whole, (first, other) = llama(0, False), run(llama, 2, True)
    assert first == other
    torch.testing.assert_close(torch.tensor(first), torch.tensor(whole), rtol=1e-3, atol=0)
