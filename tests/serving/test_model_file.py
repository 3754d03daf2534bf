"""lsq's own file: what is read is what was written, bit by bit, and nothing else is read."""

import dataclasses
import functools
import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lsq.models.sparsity import choose
from lsq.quant.declared import declare
from lsq.serving import SearchOptions, model_file
from lsq.serving.decoding_model import DecodingModel, model_of
from lsq.serving.model_file import ExportedModel
from tests.fuzz import trial
from tests.fuzz.mutations import mutated_bytes, mutated_json
from tests.layers.test_clip_format import forgotten
from tests.serving.models import MIX, WHOLE_MIX, small_model

CONFIGURATIONS = [
    {},
    {"encoder_layers": 0, "words": 21, "tied": False, "pre_norm": True},
    {
        "shared": False,
        "quant": {"weight_format": "int4"},
        "embedding": {"positions": "learned", "layer_norm": True},
    },
    {"quant": {"weight_granularity": "tensor", "bits": 5}, "activation": "gelu"},
    {"quant": {"weight_format": "ternary/tensor"}},
    {"quant": {"weight_format": "int3/row"}, "words": 21, "tied": False},
    {"quant": {"weight_format": "fp4-e2m1/tensor"}},
    {"quant": {"weight_format": MIX}, "shared": False},
    {"quant": {"weight_format": WHOLE_MIX}},
    {"quant": {"weight_format": "int4,*fc2*=int8"}},
]
TINY = {"encoder_layers": 1, "decoder_layers": 1, "words": 21, "hidden": 16, "feed_forward": 32}


@functools.cache
def small(options: str) -> DecodingModel:
    return model_of(small_model(**eval(options)))


def exported(sparse: bool = False, **options) -> ExportedModel:
    """With tensors of its own; `sparse`: the codes of one feed-forward block are 2:4 sparse."""
    model = small(repr(options))
    tensors = {name: tensor.clone() for name, tensor in model.tensors.items()}
    for name in sparse_names(tensors) if sparse else ():
        tensors[name] *= choose(tensors[name].int().abs())
    words = {
        side: tuple(f"{side}{n}\u2581" for n in range(it.words))
        for side, it in model.architecture.stacks.items()
    }
    return ExportedModel(
        model=DecodingModel(architecture=model.architecture, tensors=tensors),
        source=words.get("encoder"),
        target=words["decoder"],
        subwords=b"pieces\0\xff",
        trained_length=30,
        search=SearchOptions(beam=3, max_len_b=30),
    )


def sparse_names(tensors) -> list[str]:
    begin, end = "encoder.layers.0.feed_forward", ".codes"
    return [name for name in tensors if name.startswith(begin) and name.endswith(end)]


def same(one: ExportedModel, other: ExportedModel) -> bool:
    """Bit by bit."""

    def content(exported: ExportedModel) -> list:
        names, tensors = (
            ("source", "target", "subwords", "trained_length", "search"),
            exported.model.tensors,
        )
        bits = {name: (one.dtype, one.view(torch.uint8).tolist()) for name, one in tensors.items()}
        texts = [getattr(exported, name) for name in names]
        return [exported.model.architecture, *texts, bits]

    return content(one) == content(other)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def rewrite(path, change) -> None:
    """Write a file again with other content, under a checksum that fits."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        metadata = file.metadata()
    del metadata[model_file.CHECKSUM]
    change(metadata, tensors)
    metadata[model_file.CHECKSUM] = model_file.checksum_of_texts(metadata)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_what_is_read_is_what_was_written(path, options):
    before = exported(**options)
    for model in (before, dataclasses.replace(before, subwords=None, trained_length=None)):
        model_file.write(path, model)
        assert model_file.is_model_file(path) and same(model, model_file.read(path))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_sparse_codes_take_less_room(path):
    model_file.write(path, exported())
    dense_size, before = path.stat().st_size, exported(sparse=True)
    model_file.write(path, before)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "lsq model 2"
        stored = {name: file.get_tensor(name) for name in file.keys()}
    names = sparse_names(before.model.tensors)
    assert names and not set(names) & set(stored)
    for name in names:
        parts = stored[name + ".values"].nbytes + stored[name + ".indices"].nbytes
        assert parts == before.model.tensors[name].nbytes * 5 // 8
    assert same(before, model_file.read(path)) and path.stat().st_size < dense_size


@pytest.mark.parametrize(("form", "bits"), [("ternary/row", 1.6), ("int3/row", 3), ("int6/row", 6)])
def test_narrow_codes_take_as_many_bits_as_they_have(path, form, bits):
    before = exported(quant={"weight_format": form})
    model_file.write(path, before)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "lsq model 3"
        stored = {name: file.get_tensor(name) for name in file.keys()}
    for name, codes in before.model.tensors.items():
        if name.endswith(".codes"):
            found = stored[name + ".narrow"].numel()
            assert bits * codes.numel() / 8 <= found < bits * codes.numel() / 8 + 4
    assert same(before, model_file.read(path))


def test_codes_of_a_mix_are_stored_each_in_its_way(path):
    mix = "int8,*qkv*=int3/row,decoder.layers.0.*=ternary/row,decoder.layers.1.*fc1*=int4"
    before = exported(sparse=True, quant={"weight_format": mix})
    model_file.write(path, before)
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    for name, part, bytes_of_codes in (
        ("encoder.layers.0.feed_forward.fc2_weight", ".values", 48 * 96 / 2),
        ("encoder.layers.1.feed_forward.fc2_weight", "", 48 * 96),
        ("encoder.layers.0.self_attn.qkv_weight", ".narrow", 144 * 48 * 3 / 8),
        ("decoder.layers.0.feed_forward.fc1_weight", ".narrow", -(-96 * 48 // 5)),
        ("decoder.layers.1.feed_forward.fc1_weight", "", 96 * 2 * 17),
    ):
        assert stored[f"{name}.codes{part}"].nbytes == bytes_of_codes, name
    assert same(before, model_file.read(path))


def change_format(name, form):
    """Change the format of a weight in the architecture."""

    def changing(metadata, tensors):
        architecture = json.loads(metadata["architecture"])
        quant = architecture[name.partition(".")[0]]["config"]["quant"]
        quant["weight_format"] += f",{name}={form}"
        metadata["architecture"] = json.dumps(architecture)

    return changing


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_format("encoder.layers.0.self_attn.qkv_weight", "int2/row"), "packed holds"),
        (change_format("encoder.layers.0.self_attn.qkv_weight", "int4"), "packed holds"),
        (change_format("decoder.layers.1.feed_forward.fc2_weight", "int4"), "it must be"),
        (change_format("decoder.layers.1.feed_forward.fc2_weight", "int9"), "weight_format is"),
        (change_format("decoder.layers.1.feed_forward.fc2_weight", ""), "weight_format is"),
        (
            change_format("decoder.layers.1.feed_forward.fc2_weight", "int8/group16"),
            "decoder.layers.1.feed_forward.fc2_weight in int8/group16, activations in int8",
        ),
        (
            lambda metadata, tensors: tensors.update(
                {"x.codes.narrow": torch.zeros(4, dtype=torch.uint8)}
            ),
            "x.codes is torch.uint8 of shape None",
        ),
    ],
)
def test_formats_of_a_mix_that_do_not_fit_are_named(path, change, reason):
    model_file.write(path, exported(quant={"weight_format": "int8,*qkv*=int3/row"}))
    rewrite(path, change)
    with pytest.raises(ValueError, match=f"model.safetensors is damaged or no model.*{reason}"):
        model_file.read(path)


def test_a_format_of_a_user_is_read_where_nobody_declared_it(path):
    declare("seven_exported", (-4, -2, -1, 0, 1, 2, 4))
    before = exported(quant={"weight_format": "seven_exported/row"})
    model_file.write(path, before)
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    name = next(name for name in before.model.tensors if name.endswith(".codes"))
    codes = before.model.tensors[name]
    assert set(codes.unique().tolist()) == {-4, -2, -1, 0, 1, 2, 4}
    assert stored[name + ".narrow"].numel() == -(-codes.numel() // 8) * 3
    forgotten("seven_exported")
    assert same(before, model_file.read(path))
    forgotten("seven_exported")
    declare("seven_exported", (-3, -2, -1, 0, 1, 2, 3))
    with pytest.raises(ValueError, match="seven_exported has 7 values here and 7 in the exported"):
        model_file.read(path)


@pytest.mark.thorough
def test_reading_maps_codes_and_needs_no_fairseq(path):
    model_file.write(path, exported())
    code = f"""
import sys
from pathlib import Path
from lsq.serving import model_file
found = model_file.read(Path({str(path)!r}))
maps = [line for line in open("/proc/self/maps") if line.rstrip().endswith("model.safetensors")]
ranges = [line.split()[0].split("-") for line in maps]
for name, tensor in found.model.tensors.items():
    mapped = any(int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in ranges)
    assert mapped == name.endswith(".codes"), name
late = ("fairseq", "omegaconf", "matplotlib")
assert not [name for name in sys.modules if name.split(".")[0] in late]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@trial.quick_counts
@pytest.mark.parametrize("part", ["all", "header"])
@pytest.mark.parametrize("form", ["int8", "ternary/row", "int8,*fc2*=int4,*out*=int3/row"])
def test_no_damage_is_read_in_silence(path, part, form, count):
    before = exported(**TINY, quant={"weight_format": form})
    model_file.write(path, before)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")

    def attempt(chance):
        if part == "header":
            header = mutated_json(content[8:start], chance)
            path.write_bytes(len(header).to_bytes(8, "little") + header + content[start:])
        else:
            path.write_bytes(mutated_bytes(content, chance))
        found = trial.outcome(lambda: model_file.read(path), path.parent)
        if found.refusal is None and not found.fault and not same(before, found.result):
            return trial.Outcome(fault="read another model")
        return found

    worked, refused = trial.survey(f"model {form} {part}", count, attempt)
    assert refused > 0.8 * count, (worked, refused)


def change_sparse(end: str, change):
    """Change the tensors whose names end so; None removes one."""

    def changing(metadata, tensors):
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = change(tensors[name])
            if tensors[name] is None:
                del tensors[name]

    return changing


def change_shapes(change):
    """Change the shapes of narrow codes."""

    def changing(metadata, tensors):
        shapes = json.loads(metadata[model_file.SHAPES])
        metadata[model_file.SHAPES] = json.dumps({k: change(v) for k, v in shapes.items()})

    return changing


def text(**texts):
    return lambda metadata, tensors: metadata.update(texts)


@pytest.mark.parametrize(
    ("sparse", "change", "reason"),
    [
        (False, text(format="lsq model 4"), "its format is 'lsq model 4'"),
        (False, lambda metadata, tensors: metadata.pop("format"), "its format is ''"),
        (False, lambda metadata, tensors: metadata.pop("architecture"), "architecture"),
        (False, text(target='["a"]'), "the decoder has 37 words, and its vocabulary 1"),
        (False, text(source="null"), "the encoder has 37 words, and its vocabulary 0"),
        (False, text(tensors="[]"), "tensors"),
        (False, text(source='{"a": 1}'), "source"),
        (False, text(trained_length='"x"'), "trained_length"),
        (False, text(search='{"beem": 2}'), "search has an option that this version"),
        (False, text(search='{"beam": 0}'), "beam is 0"),
        (False, lambda metadata, tensors: tensors.popitem(), "lacks tensors"),
        (False, lambda metadata, tensors: tensors.update(more=torch.zeros(3)), "tensors: more"),
        (
            False,
            lambda metadata, tensors: next(iter(tensors.values())).neg_(),
            "checksum of .* fit",
        ),
        (True, change_sparse(".indices", lambda one: None), "alone"),
        (True, change_sparse(".indices", torch.zeros_like), "checksum of .*indices does not fit"),
        (True, change_sparse(".values", lambda one: one[:, :-1].contiguous()), "they must be int8"),
        (True, text(format="lsq model 1"), "the model (lacks|has unknown) tensors"),
    ],
)
def test_what_does_not_fit_is_named(path, sparse, change, reason):
    model_file.write(path, exported(sparse))
    rewrite(path, change)
    with pytest.raises(ValueError, match=f"model.safetensors is damaged or no model.*{reason}"):
        model_file.read(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (text(narrow="[]"), "narrow is"),
        (text(narrow="{}"), "of shape None"),
        (change_shapes(lambda shape: [*shape, 1]), "not uint8"),
        (change_shapes(lambda shape: [True, 4]), "the shape of .* is"),
        (change_shapes(lambda shape: [-1, 4]), "the shape of .* is"),
        (change_shapes(lambda shape: [10**12, 10**6]), "packed holds"),
        (change_sparse(".narrow", lambda one: one[1:].contiguous()), "packed holds"),
        (change_sparse(".narrow", lambda one: one.fill_(255)), "holds code 7 of 7"),
        (change_sparse(".narrow", torch.zeros_like), "checksum of .*narrow does not"),
        (change_sparse(".narrow", lambda one: None), "lacks tensors"),
        (text(format="lsq model 1"), "the model (lacks|has unknown) tensors"),
    ],
)
def test_narrow_codes_that_do_not_fit_are_named(path, change, reason):
    model_file.write(path, exported(quant={"weight_format": "int3/row"}))
    rewrite(path, change)
    with pytest.raises(ValueError, match=f"model.safetensors is damaged or no model.*{reason}"):
        model_file.read(path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"trained_length": "30"}, SearchOptions(max_len_b=30)),
        ({"trained_length": "null"}, SearchOptions()),
        ({"search": '{"beam": 2, "diverse_beam_groups": -1}'}, SearchOptions(beam=2)),
        ({"search": '{"beam": 2, "unk_penalty": -1.5}'}, SearchOptions(beam=2)),
    ],
)
def test_options_of_the_search_in_earlier_files(path, given, expected):
    def change(metadata, tensors):
        del metadata["search"]
        metadata.update(given)

    model_file.write(path, exported())
    rewrite(path, change)
    assert model_file.read(path).search == expected


def test_other_files_are_refused(tmp_path, path):
    with pytest.raises(FileNotFoundError):
        model_file.read(path)
    with pytest.raises(IsADirectoryError):
        model_file.read(tmp_path)
    for content in (b"", b"text\n", b"PK\3\4" + bytes(100)):
        path.write_bytes(content)
        assert not model_file.is_model_file(path)
        with pytest.raises(ValueError, match="is damaged or no model of `lsq export`"):
            model_file.read(path)


def test_models_that_are_not_written(tmp_path):
    model = exported()
    with pytest.raises(ValueError, match="a word is twice in the vocabulary of the decoder"):
        dataclasses.replace(model, target=("a", *model.target[1:-1], "a"))
    model.model.tensors["decoder.embed_tokens.weight"][3, 3] = torch.nan
    with pytest.raises(ValueError, match="decoder.embed_tokens.weight holds NaN or infinity"):
        model_file.write(tmp_path / "model", model)
    assert not list(tmp_path.iterdir())
