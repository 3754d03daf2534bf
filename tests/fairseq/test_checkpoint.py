"""Starting from fairseq's transformer, and what is refused in checkpoints."""

import math

import pytest
import torch
from fairseq import checkpoint_utils

from lsq.commands import allocate
from lsq.fairseq import checkpoint
from lsq.layers import clip_format
from lsq.observe import quantized_tensors
from lsq.study import groups_of
from tests.fairseq.comparison import assert_equal_states

FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy --task translation"


@pytest.fixture
def fairseq_state(build):
    """The parameters of fairseq's transformer, by its names."""
    return build(FAIRSEQ)[1].state_dict()


@pytest.fixture
def model(build):
    return build("")[1]


def test_projections_are_concatenated_in_order(build):
    fairseq_state = build(FAIRSEQ)[1].state_dict()
    renamed = checkpoint.rename(fairseq_state)
    layer = "decoder.layers.1."
    for parts, theirs, ours in (
        ("qkv", "self_attn.{}_proj.weight", "self_attn.qkv_weight"),
        ("kv", "encoder_attn.{}_proj.bias", "encoder_attn.key_value_bias"),
        ("q", "encoder_attn.{}_proj.weight", "encoder_attn.query_weight"),
        ("o", "self_attn.{}ut_proj.bias", "self_attn.out_bias"),
        ("f", "{}c2.weight", "feed_forward.fc2_weight"),
    ):
        joined = [fairseq_state[layer + theirs.format(part)] for part in parts]
        assert torch.equal(renamed[layer + ours], torch.cat(joined))


@pytest.mark.parametrize(
    "options", ["", "--encoder-learned-pos --decoder-learned-pos --layernorm-embedding"]
)
def test_restored_names_are_those_of_fairseq(build, options):
    state = build(f"{FAIRSEQ} {options}")[1].state_dict()
    state = {name: value for name, value in state.items() if value.numel() > 1}
    assert_equal_states(checkpoint.restore(checkpoint.rename(state)), state)


@pytest.mark.parametrize("fixed", [False, True])
def test_loading_measures_the_clips_of_weights_and_asks_for_those_of_activations(
    build, fairseq_state, fixed
):
    _, model = build("--lsq-clip-init fixed" if fixed else "")
    layer = model.encoder.layers[0]
    clip = dict(quantized_tensors(model))["encoder.layers.0.feed_forward.fc1_weight"]
    layer.schedule.calibrated = True
    fairseq_state["encoder.layers.0.fc1.weight"] *= 100.0
    before = clip.clone()
    checkpoint.load_float(model, fairseq_state)
    assert clip.equal(before) if fixed else (clip > 10 * before).all()
    assert layer.schedule.calibrated == fixed


def test_everything_that_does_not_fit_is_listed_and_nothing_is_copied(model, fairseq_state):
    del fairseq_state["encoder.layers.0.fc1.bias"]
    fairseq_state["encoder.layers.7.fc1.bias"] = torch.zeros(48)
    fairseq_state["decoder.embed_tokens.weight"] = torch.zeros(99, 32)
    fairseq_state["decoder.attention_of_another_kind"] = torch.zeros(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        checkpoint.load_float(model, fairseq_state)
    for problem in (
        "encoder.layers.0.feed_forward.fc1_bias: nothing in the checkpoint, [48] here",
        "encoder.layers.7.feed_forward.fc1_bias: [48] in the checkpoint, nothing here",
        "decoder.embed_tokens.weight: [99, 32] in the checkpoint, [16, 32] here",
        "decoder.attention_of_another_kind: [3] in the checkpoint, nothing here",
    ):
        assert problem in str(caught.value)
    assert_equal_states(model.state_dict(), before)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "needs .* q, k, v .* has no k"),
        *((torch.zeros(shape), "joins projections, whose") for shape in [(3,), (), (32, 31)]),
    ],
)
def test_a_part_of_a_joined_weight_that_does_not_fit_is_named(model, fairseq_state, value, said):
    part = "encoder.layers.0.self_attn.k_proj.weight"
    del fairseq_state[part]
    if value is not None:
        fairseq_state[part] = value
    with pytest.raises(ValueError, match=f"encoder.layers.0.self_attn.qkv_weight {said}"):
        checkpoint.load_float(model, fairseq_state)


def test_shared_here_but_different_there(build, fairseq_state):
    _, model = build("--share-all-embeddings")
    with pytest.raises(
        ValueError, match="decoder.embed_tokens.weight: the same parameter as encoder.embed_tokens"
    ):
        checkpoint.load_float(model, fairseq_state)


def test_start_from_a_trained_transformer(train, build, batch, tmp_path):
    trained = train(tmp_path / "float", FAIRSEQ)
    path = tmp_path / "float" / "checkpoint_last.pt"
    task, model = build(f"--lsq-from {path}")
    weight = trained["model"]["encoder.embed_tokens.weight"]
    assert torch.equal(model.encoder.embed_tokens.weight, weight)

    state = train(tmp_path / "int8", f"--lsq-from {path} --max-update 2 --lr 1e-9")
    assert state["cfg"]["model"].lsq_from is None, "an int8 checkpoint must not need the float one"
    torch.testing.assert_close(
        state["model"]["encoder.embed_tokens.weight"], weight, rtol=0, atol=1e-6
    )
    assert all(value for name, value in state["model"].items() if name.endswith("calibrated"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--encoder-attention-heads 2", "--encoder-attention-heads: 4 in the checkpoint, 2 here"),
        ("--activation-fn gelu", "--activation-fn: relu in the checkpoint, gelu here"),
        (
            "--decoder-layers 1",
            "decoder.layers.1.feed_forward.fc1_bias: .48. in the checkpoint, nothing here",
        ),
    ],
)
def test_start_from_another_model_is_refused(train, build, tmp_path, given, message):
    train(tmp_path, FAIRSEQ + " --max-update 1")
    with pytest.raises(ValueError, match=message):
        build(f"--lsq-from {tmp_path}/checkpoint_last.pt {given}")


def test_start_from_nothing(build, tmp_path):
    with pytest.raises(FileNotFoundError, match="--lsq-from .*: there is no checkpoint .*none.pt"):
        build(f"--lsq-from {tmp_path}/none.pt")
    with pytest.raises(IsADirectoryError, match="--lsq-from .*: .* is a folder"):
        build(f"--lsq-from {tmp_path}")
    for content, said in (
        (b"", "is damaged: it is empty"),
        (b"no checkpoint", "is not a checkpoint of fairseq's"),
    ):
        (tmp_path / "other.pt").write_bytes(content)
        with pytest.raises(ValueError, match=f"--lsq-from .*: .*other.pt {said}"):
            build(f"--lsq-from {tmp_path}/other.pt")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(
            ("encoder.layers.1.feed_forward.activation_clip", [value], "is")
            for value in (0.0, -1.0, math.nan, math.inf, 3e38)
        ),
        *(
            ("decoder.layers.0.passes", value, r"is .*a number from -1 to")
            for value in (-2, 2**60, math.inf, math.nan)
        ),
        ("decoder.layers.0.calibrated", 7, "is 7; it must"),
    ],
)
def test_impossible_values_in_a_checkpoint_are_named(model, name, value, said):
    state = model.state_dict() | {name: torch.tensor(value)}
    with pytest.raises(ValueError, match=f"{name} in the checkpoint {said}"):
        model.load_state_dict(state)


def mean_of_fairseq(states: list[dict]) -> dict:
    """As scripts/average_checkpoints.py of fairseq: all tensors are added up, then divided in
    place."""
    found = {}
    for state in states:
        for name, value in state.items():
            value = value.float() if value.dtype is torch.float16 else value
            found[name] = found[name].add_(value) if name in found else value.clone()
    return {name: value.div_(len(states)) for name, value in found.items()}


def test_the_mean_of_checkpoints_is_one(build, batch):
    """Its weights and clips are the means, its clips count as measured, and it translates."""
    task, model = build("")
    sample, states = batch(task)["net_input"], []
    for step in range(3):
        model.train()(**sample)[0].sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.02 * step)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    assert {value.dtype for value in states[0].values()} == {torch.float32, torch.float64}
    _, averaged = build("")
    averaged.load_state_dict(mean_of_fairseq(states))
    for name, parameter in averaged.named_parameters():
        expected = torch.stack([state[name].double() for state in states]).mean(0)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-7)
    schedules = [layer.schedule for layer in (*averaged.encoder.layers, *averaged.decoder.layers)]
    states = {(one.calibrated, one.passes, one.float_fallback) for one in schedules}
    assert states == {(True, 2, False)}
    clips = {name: clip.clone() for name, clip in quantized_tensors(averaged)}
    logits, _ = averaged.eval()(**sample)
    assert logits.isfinite().all()
    assert all(clip.equal(clips[name]) for name, clip in quantized_tensors(averaged))


def test_the_mean_of_what_was_not_measured_is_measured_anew(build, batch):
    task, model = build("")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()(**batch(task)["net_input"])
    model.load_state_dict(mean_of_fairseq([model.state_dict(), before]))
    layer = model.encoder.layers[0]
    assert not layer.schedule.calibrated and not layer.schedule.begun


def test_a_checkpoint_of_integers_is_loaded(model):
    """As it was before all of a model's state were floats."""
    state = model.state_dict()
    kinds = {"passes": torch.int64, "calibrated": torch.bool, "float_fallback": torch.bool}
    kinds["format"] = torch.uint8
    for name, value in state.items():
        state[name] = value.to(kinds.get(name.rpartition(".")[2], value.dtype))
    layer = "decoder.layers.0."
    state |= {layer + "passes": torch.tensor(5), layer + "calibrated": torch.tensor(True)}
    model.load_state_dict(state)
    schedule = model.decoder.layers[0].schedule
    assert schedule.passes == 5 and schedule.calibrated


@pytest.fixture
def aged():
    """aged(state): as versions before 0.2 wrote it, with clips before biases and counts of inner
    modules."""

    def aged(state: dict) -> dict:
        for name in [name for name in state if name.endswith("self_attn.out_weight")]:
            layer = name.removesuffix("self_attn.out_weight")
            blocks = [block for block in BLOCKS if layer + block + ".input_clip" in state]
            for block in blocks:
                more = {"calibrated": torch.tensor(False), "passes": torch.tensor(0)}
                more[BLOCKS[block]] = torch.ones(1)
                state.update((f"{layer}{block}.{name}", value) for name, value in more.items())
        return state

    clip_format._warn.cache_clear()
    yield aged
    clip_format._warn.cache_clear()


BLOCKS = {"self_attn": "out_clip", "encoder_attn": "out_clip", "feed_forward": "hidden_clip"}
"""Blocks of layers -> the clip that each had more."""


def test_an_older_checkpoint_is_loaded_with_one_warning_and_calibrated_again(
    build, batch, aged, caplog
):
    task, before = build("")
    sample = batch(task)["net_input"]
    before.train()(**sample)
    state = aged(before.state_dict())
    assert len([name for name in state if name.endswith("_clip")]) == 64
    for name in state:
        if name.endswith("_clip") and not name.endswith("weight_clip"):
            state[name] = state[name] * 1000.0
    _, after = build("")
    after.load_state_dict(state)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["a checkpoint of an older version; clips of activations are measured again"]
    layers = [*after.encoder.layers, *after.decoder.layers]
    schedules = [layer.schedule for layer in layers]
    assert {(one.calibrated, one.passes) for one in schedules} == {(False, 1)}
    after.eval()(**sample)
    assert all(layer.schedule.calibrated for layer in layers)
    clips = {name: clip for name, clip in quantized_tensors(after) if ".layers." in name}
    assert all(0 < clip.max() < 100 for clip in clips.values()) and len(clips) == 52


@pytest.mark.thorough
def test_an_older_checkpoint_is_translated_with_but_not_trained_on_with_its_optimizer(
    train, tmp_path, aged
):
    path = tmp_path / "checkpoint_last.pt"
    state = train(tmp_path, "--max-update 2")
    aged(state["model"])
    number = len(state["last_optimizer_state"]["state"])
    state["last_optimizer_state"]["param_groups"][0]["params"].append(number)
    torch.save(state, path)
    checkpoint_utils.load_model_ensemble_and_task([str(path)])
    with pytest.raises(
        ValueError, match="optimizer is of other parameters .*older version.* add --reset-optimizer"
    ):
        train(tmp_path, "--max-update 3")
    assert train(tmp_path, "--max-update 1 --reset-optimizer")


def test_checkpoints_of_the_other_mode_are_refused(build, model):
    _, in_float = build("--lsq-mode float")
    with pytest.raises(ValueError, match="holds no clips.*--lsq-from"):
        model.load_state_dict(in_float.state_dict())
    with pytest.raises(ValueError, match="holds 54 clips.*--lsq-mode int8"):
        in_float.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="--lsq-from was given an int8 model's checkpoint"):
        checkpoint.load_float(model, model.state_dict())


@pytest.mark.thorough
def test_a_training_goes_on_with_what_it_was_trained_with(train, parse, tmp_path):
    """Whatever the defaults are by now; options that are given win."""
    train(tmp_path / "two", "--max-update 2 --lsq-backward float --lsq-clip-gradient lsq")
    resumed = train(tmp_path / "two", "--max-update 4")
    kept = resumed["cfg"]["model"]
    assert (kept.lsq_backward, kept.lsq_clip_gradient) == ("float", "lsq")
    whole = train(tmp_path / "whole", "--max-update 4 --lsq-backward float --lsq-clip-gradient lsq")
    assert_equal_states(resumed["model"], whole["model"])
    last = tmp_path / "two" / "checkpoint_last.pt"
    assert parse(f"--restore-file {last}").lsq_backward == "float"
    given = parse(f"--restore-file {last} --lsq-backward int8")
    assert (given.lsq_backward, given.lsq_clip_gradient) == ("int8", "lsq")
    assert parse(f"--finetune-from-model {last}").lsq_backward == "int8"


@pytest.mark.parametrize("content", [b"", b"no checkpoint"])
def test_no_options_in_a_damaged_checkpoint(parse, tmp_path, content):
    (tmp_path / "checkpoint_last.pt").write_bytes(content)
    assert checkpoint.trained_with(parse(f"--save-dir {tmp_path}")) == {}


@pytest.mark.parametrize("options", ["", "--share-all-embeddings"])
def test_groups_of_fairseqs_own_model_are_weights_of_ours(build, options):
    theirs, ours = build(f"{FAIRSEQ} {options}")[1], build(options)[1]
    groups = allocate._groups_of_fairseq(theirs)
    expected = groups_of(ours).weights
    named = [tuple(dict.fromkeys(groups.names.get(n, n) for n in one)) for one in groups.weights]
    assert sorted(named) == sorted(expected) and len(named) > 8
    state = checkpoint.rename(theirs.state_dict())
    for names, (name,) in zip(groups.weights, named, strict=True):
        if len(names) > 1:
            parts = torch.cat([theirs.get_parameter(one) for one in names])  # in another order
            assert torch.equal(parts.sort(0).values, state[name].sort(0).values)
