"""lsq.safetensors beside the weights of a model: written, read, refused."""

import pytest
import torch
from torch import nn

import lsq
from lsq.models.huggingface import load_clips, save_clips
from tests.models.models import loss_of, model, tokens


def trained(seed: int = 1) -> nn.Module:
    made = model(seed)
    lsq.convert(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(3):
        loss_of(made(tokens(step))).backward()
        optimizer.step()
    return made


def test_clips_go_on_where_they_were(tmp_path):
    first = trained()
    assert save_clips(first, tmp_path / "new") == tmp_path / "new" / "lsq.safetensors"
    second = model(5)
    second.load_state_dict(lsq.models.float_state_dict(first))
    lsq.convert(second)
    load_clips(second, tmp_path / "new")
    for (name, one), other in zip(
        first.state_dict().items(), second.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    torch.manual_seed(3)
    expected = first(tokens(7))
    torch.manual_seed(3)
    assert torch.equal(second(tokens(7)), expected)


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="so there are no clips; call lsq.convert"):
        save_clips(model(1), tmp_path)
    with pytest.raises(
        FileNotFoundError,
        match=r"lsq\.safetensors is not there: .*save_clips.* writes it.* next pass",
    ):
        load_clips(trained(), tmp_path)
    with pytest.raises(FileNotFoundError, match="new is no folder on this machine"):
        load_clips(trained(), tmp_path / "new")
    path = save_clips(trained(), tmp_path)
    with pytest.raises(FileNotFoundError, match="give the folder that it is in"):
        load_clips(trained(), path)
    with pytest.raises(
        ValueError,
        match=r"lsq\.safetensors: no layer of this Model is .* call lsq\.convert\(model\)",
    ):
        load_clips(model(1), tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:100])
    with pytest.raises(ValueError, match=r"lsq\.safetensors: "):
        load_clips(trained(), tmp_path)
    path.write_bytes(content)
    assert not list(tmp_path.glob("*.partial"))
