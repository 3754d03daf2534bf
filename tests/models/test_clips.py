"""The clips of a converted model by themselves."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

import lsq
from lsq.config import QuantConfig
from lsq.models import average_clips, load_clips, save_clips
from lsq.models.clips import clip_names, clip_state, keep_apart, load_clip_state
from lsq.models.sparsity import sparsify
from lsq.run.parameter_state import steps
from tests.dist.processes import run
from tests.models.models import Model, loss_of, model, tokens


class Pretrained(nn.Module):
    """Does as the models of transformers do."""

    _keys_to_ignore_on_save = None

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def saved(self) -> set[str]:
        return self.state_dict().keys() - set(self._keys_to_ignore_on_save or ())


def made(**options) -> Pretrained:
    model = Pretrained(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 64))
    lsq.convert(model, QuantConfig(**options), minimum_width=16)
    model.layers(torch.randn(5, 64)).sum().backward()
    return model


def test_names_and_values():
    model = made()
    state = clip_state(model)
    assert state.keys() == clip_names(model)
    names = {"weight_clip", "input_clip", "calibrated", "passes", "float_fallback", "format"}
    assert {name.rpartition(".")[2] for name in state} == names
    model.layers[0].weight_clip.data.fill_(7.0)
    assert not state["layers.0.weight_clip"].eq(7.0).any()


@pytest.mark.parametrize("clips", ["learned", "absmax"])
def test_what_is_saved_goes_on(clips):
    """Clips of weights that do not learn are those of the weights that are there."""
    first, second = made(clips=clips), made(clips=clips)
    weights = {
        name: value.clone()
        for name, value in second.named_parameters()
        if name not in clip_names(second)
    }
    load_clip_state(second, clip_state(first))
    wanted, loaded = clip_state(first), clip_state(second)
    for name, value in wanted.items():
        if clips == "absmax" and name.endswith("weight_clip"):
            value = second.get_parameter(name.removesuffix("_clip")).detach().abs().amax(dim=1)
        assert torch.equal(value, loaded[name]), name
    assert all(torch.equal(second.get_parameter(name), value) for name, value in weights.items())


def test_the_mean_of_clips_is_loaded():
    first, second, third = made(), made(), made()
    states = clip_state(first), clip_state(second)
    load_clip_state(
        third, {name: (value + states[1][name]) / 2 for name, value in states[0].items()}
    )
    for name, clip in third.layers[0].clips().items():
        one, other = (model.layers[0].clips()[name] for model in (first, second))
        torch.testing.assert_close(clip, (one + other) / 2)
    assert third.layers[0].calibrated and third.layers[0].passes == 1


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_models_has_the_mean_of_weights_and_clips(use_buffers):
    """The float model with the mean of the weights is what it is close to."""
    model, x = made(), torch.randn(5, 64)
    averaged = swa_utils.AveragedModel(model, use_buffers=use_buffers)
    seen = []
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.03)
        averaged.update_parameters(model)
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    for parameter, *values in zip(averaged.module.parameters(), *seen, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.stack(values).mean(0))
    clips = {name: value.clone() for name, value in clip_state(averaged.module).items()}
    found = averaged.eval().module.layers(x)
    assert all(
        torch.equal(value, clips[name]) for name, value in clip_state(averaged.module).items()
    )
    expected = lsq.revert(averaged.module).layers(x)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_masks_go_with_the_clips():
    models = made(), made()
    for one in models:
        sparsify(one)
    first, second = models
    state = clip_state(first)
    assert {"layers.0.weight_kept", "layers.2.weight_kept"} < state.keys()
    assert first.saved() == {
        f"layers.{layer}.{name}" for layer in range(3) for name in ("weight", "bias")
    }
    load_clip_state(second, state)
    assert torch.equal(second.layers[0].weight_kept, first.layers[0].weight_kept)


def test_other_clips_are_refused():
    model, state = made(), clip_state(made())
    kept = clip_state(model)
    with pytest.raises(
        ValueError, match=r"1 of this model are missing, first layers\.0\.weight_clip, and 1 are of"
    ):
        load_clip_state(
            model,
            {name.replace("0.weight_clip", "7.weight_clip"): one for name, one in state.items()},
        )
    with pytest.raises(
        ValueError, match="weight_granularity='tensor', but .* weight_granularity='channel'"
    ):
        load_clip_state(model, clip_state(made(weight_granularity="tensor")))
    with pytest.raises(ValueError, match="not a number|finite|above 0"):
        load_clip_state(model, {**state, "layers.2.input_clip": torch.tensor([float("nan")])})
    assert all(torch.equal(value, clip_state(model)[name]) for name, value in kept.items())


def test_clips_of_earlier_versions_are_integers():
    """Which did not say so."""
    state = {name: one for name, one in clip_state(made()).items() if not name.endswith(".format")}
    load_clip_state(made(), state)
    model = made(weight_format="int8,layers.2.*=nvfp4")
    kept = clip_state(model)
    with pytest.raises(
        ValueError, match=r"layers\.2\.\*\) was trained with weight_format='int8', but .*'nvfp4'"
    ):
        load_clip_state(model, state)
    assert all(torch.equal(value, clip_state(model)[name]) for name, value in kept.items())


def test_checkpoints_of_transformers_leave_clips_out():
    model = made()
    floats = {f"layers.{layer}.{name}" for layer in range(3) for name in ("weight", "bias")}
    assert model.saved() == floats
    keep_apart(model, apart=False)
    assert model.saved() == floats | clip_names(model)
    keep_apart(model)
    assert lsq.revert(model).saved() == floats and not model._keys_to_ignore_on_save
    assert not Pretrained._keys_to_ignore_on_save


LEARNED = QuantConfig(clips="learned")


def train(converted, *optimizers, steps=2):
    for _ in range(steps):
        loss_of(converted(tokens())).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(("quant", "warnings"), [(LEARNED, 1), (None, 0)])
def test_an_optimizer_that_was_made_before(quant, warnings, caplog):
    """Without clips that learn nothing is lost: the weights are the parameters that they were."""
    converted = model()
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.01)
    lsq.convert(converted, quant)
    before = converted.blocks[0].up.weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        train(converted, optimizer)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings and all(
        "made before lsq.convert; make the optimizer, or" in text for text in said
    )
    assert not torch.equal(before, converted.blocks[0].up.weight)


@pytest.mark.parametrize("apart", [False, True])
def test_clips_that_an_optimizer_has(apart, caplog):
    watched = len(steps.before)
    converted = model()
    lsq.convert(converted, LEARNED)
    assert len(steps.before) == watched + 1
    other = torch.nn.Linear(2, 2)
    train(converted, torch.optim.SGD(other.parameters(), lr=0.1))  # says nothing about this model
    assert len(steps.before) == watched + 1
    named = dict(converted.named_parameters())
    parts = [
        [one for name, one in named.items() if name.endswith("_clip") is clips]
        for clips in (False, True)
    ]
    groups = parts if apart else [sum(parts, [])]
    train(converted, *(torch.optim.SGD(group, lr=0.01) for group in groups))
    assert not caplog.records and len(steps.before) == watched


def test_a_model_that_is_gone_is_watched_no_more():
    watched = len(steps.before)
    lsq.convert(model(), LEARNED)
    other = torch.nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert len(steps.before) == watched


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


def test_files_that_do_not_fit_are_refused(tmp_path):
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


STEPS = 5


def trained_in_workers(rank: int, averaging: bool) -> tuple[dict[str, torch.Tensor], int]:
    made: Model = model()
    lsq.convert(made, QuantConfig(clips="learned"))
    handle = average_clips(made) if averaging else None
    passes = []
    made.words.register_forward_hook(lambda *arguments: passes.append(torch.is_grad_enabled()))
    made.score.requires_grad_(False)  # which no batch reaches
    parallel = DistributedDataParallel(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(parallel(tokens(10 * rank + step))).backward()
        optimizer.step()
    if handle is not None:
        handle.remove()
    return {
        name: clip.detach() for name, clip in made.named_parameters() if name.endswith("input_clip")
    }, len(passes)


def test_clips_of_inputs_stay_equal():
    """Also without a word, and by no pass more."""
    for averaging in (True, False):
        (first, passes), (second, _) = run(trained_in_workers, 2, averaging)
        assert first and all(torch.equal(first[name], second[name]) for name in first)
        assert passes == STEPS


def test_one_process_is_told():
    made = nn.Sequential(nn.Linear(64, 64))
    lsq.convert(made)
    with pytest.raises(ValueError, match="there is one process; average_clips is for several"):
        average_clips(made)
