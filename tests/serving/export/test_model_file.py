"""lsq's own file: what is read is what was written, bit by bit, and nothing else is read."""

import dataclasses
import functools
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lsq.models.sparsity import choose
from lsq.serving.decode import SearchOptions
from lsq.serving.decode.model import DecodingModel, model_of
from lsq.serving.export import model_file
from lsq.serving.export.model_file import ExportedModel
from tests.fuzz import trial
from tests.fuzz.mutations import mutated_bytes, mutated_json
from tests.serving.decode.models import small_model

CONFIGURATIONS = [
    {},
    {"encoder_layers": 0, "words": 21, "tied": False, "pre_norm": True},
    {
        "shared": False,
        "quant": {"weight_format": "int4"},
        "embedding": {"positions": "learned", "layer_norm": True},
    },
    {"quant": {"weight_granularity": "tensor", "bits": 5}, "activation": "gelu"},
]


@functools.cache
def small(options: str) -> DecodingModel:
    return model_of(small_model(**eval(options)))


def exported(**options) -> ExportedModel:
    """With tensors of its own."""
    model = small(repr(options))
    model = DecodingModel(
        architecture=model.architecture, tensors={n: t.clone() for n, t in model.tensors.items()}
    )
    words = {
        side: tuple(f"{side}{n}\u2581" for n in range(it.words))
        for side, it in model.architecture.stacks.items()
    }
    return ExportedModel(
        model=model,
        source=words.get("encoder"),
        target=words["decoder"],
        subwords=b"pieces\0\xff",
        trained_length=30,
        search=SearchOptions(beam=3, max_len_b=30),
    )


def same(one: ExportedModel, other: ExportedModel) -> bool:
    """Bit by bit."""
    mine, others = one.model.tensors, other.model.tensors
    names = ("source", "target", "subwords", "trained_length", "search")
    return (
        one.model.architecture == other.model.architecture
        and all(getattr(one, name) == getattr(other, name) for name in names)
        and mine.keys() == others.keys()
        and all(
            torch.equal(mine[name].view(torch.uint8), others[name].view(torch.uint8))
            for name in mine
        )
    )


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_what_is_read_is_what_was_written(tmp_path, options):
    path, before = tmp_path / "model.safetensors", exported(**options)
    model_file.write(path, before)
    assert model_file.is_model_file(path)
    assert same(before, model_file.read(path))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_without_what_is_optional(tmp_path):
    before = dataclasses.replace(exported(), subwords=None, trained_length=None)
    model_file.write(tmp_path / "model", before)
    assert same(before, model_file.read(tmp_path / "model"))


def sparse() -> ExportedModel:
    """The codes of one layer's feed-forward weights are 2:4 sparse."""
    found = exported()
    for name, codes in found.model.tensors.items():
        if name.startswith("encoder.layers.0.feed_forward") and name.endswith(".codes"):
            codes *= choose(codes.int().abs())
    return found


def test_sparse_codes_take_less_room(tmp_path):
    before = sparse()
    names = [
        name
        for name in before.model.tensors
        if name.startswith("encoder.layers.0.f") and name.endswith(".codes")
    ]
    assert names
    model_file.write(tmp_path / "dense", exported())
    model_file.write(tmp_path / "sparse", before)
    with safe_open(tmp_path / "sparse", framework="pt") as file:
        assert file.metadata()["format"] == "lsq model 2"
        stored = {name: file.get_tensor(name) for name in file.keys()}
    for name in names:
        assert name not in stored
        parts = stored[name + ".values"].nbytes + stored[name + ".indices"].nbytes
        assert parts == before.model.tensors[name].nbytes * 5 // 8
    assert same(before, model_file.read(tmp_path / "sparse"))
    assert (tmp_path / "sparse").stat().st_size < (tmp_path / "dense").stat().st_size


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda metadata, tensors: tensors.pop(
                next(name for name in tensors if name.endswith(".indices"))
            ),
            "alone",
        ),
        (
            lambda metadata, tensors: [
                one.zero_() for name, one in tensors.items() if name.endswith(".indices")
            ],
            "the checksum of .*indices does not fit",
        ),
        (
            lambda metadata, tensors: tensors.update(
                {
                    name: one[:, :-1].contiguous()
                    for name, one in tensors.items()
                    if name.endswith(".values")
                }
            ),
            "they must be int8",
        ),
        (
            lambda metadata, tensors: metadata.update(format="lsq model 1"),
            "the model (lacks|has unknown) tensors",
        ),
    ],
)
def test_sparse_codes_that_do_not_fit_are_named(tmp_path, change, reason):
    path = tmp_path / "model.safetensors"
    model_file.write(path, sparse())
    rewritten(path, change)
    with pytest.raises(ValueError, match=f"model.safetensors is damaged or no model.*{reason}"):
        model_file.read(path)


def test_reading_maps_codes_and_needs_no_fairseq(tmp_path):
    path = tmp_path / "model.safetensors"
    model_file.write(path, exported())
    code = f"""
import sys
from pathlib import Path
from lsq.serving.export import model_file
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
def test_no_damage_is_read_in_silence(tmp_path, part, count):
    before = exported(encoder_layers=1, decoder_layers=1, words=21, hidden=16, feed_forward=32)
    path = tmp_path / "model.safetensors"
    model_file.write(path, before)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")

    def attempt(chance):
        if part == "header":
            header = mutated_json(content[8:start], chance)
            path.write_bytes(len(header).to_bytes(8, "little") + header + content[start:])
        else:
            path.write_bytes(mutated_bytes(content, chance))
        found = trial.outcome(lambda: model_file.read(path), tmp_path)
        if found.refusal is None and not found.fault and not same(before, found.result):
            return trial.Outcome(fault="read another model")
        return found

    worked, refused = trial.survey(f"model {part}", count, attempt)
    assert refused > 0.8 * count, (worked, refused)


def rewritten(path, change):
    """`path`, written again with other metadata, under a checksum that fits."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = (
            file.metadata(),
            {name: file.get_tensor(name).clone() for name in file.keys()},
        )
    del metadata[model_file.CHECKSUM]
    change(metadata, tensors)
    metadata[model_file.CHECKSUM] = model_file.checksum_of_texts(metadata)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda metadata, tensors: metadata.update(format="lsq model 3"),
            "its format is 'lsq model 3'",
        ),
        (lambda metadata, tensors: metadata.pop("format"), "its format is ''"),
        (lambda metadata, tensors: metadata.pop("architecture"), "architecture"),
        (
            lambda metadata, tensors: metadata.update(target='["a"]'),
            "the decoder has 37 words, and its vocabulary 1",
        ),
        (
            lambda metadata, tensors: metadata.update(source="null"),
            "the encoder has 37 words, and its vocabulary 0",
        ),
        (lambda metadata, tensors: metadata.update(tensors="[]"), "tensors"),
        (lambda metadata, tensors: metadata.update(source='{"a": 1}'), "source"),
        (lambda metadata, tensors: metadata.update(trained_length='"x"'), "trained_length"),
        (
            lambda metadata, tensors: metadata.update(search='{"beem": 2}'),
            "search has an option that this version",
        ),
        (lambda metadata, tensors: metadata.update(search='{"beam": 0}'), "beam is 0"),
        (lambda metadata, tensors: tensors.popitem(), "lacks tensors"),
        (lambda metadata, tensors: tensors.update(more=torch.zeros(3)), "unknown tensors: more"),
        (
            lambda metadata, tensors: next(iter(tensors.values())).neg_(),
            "the checksum of .* does not fit",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, reason):
    path = tmp_path / "model.safetensors"
    model_file.write(path, exported())
    rewritten(path, change)
    with pytest.raises(ValueError, match=f"model.safetensors is damaged or no model.*{reason}"):
        model_file.read(path)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("30", SearchOptions(max_len_b=30)),
        ("null", SearchOptions()),
    ],
)
def test_earlier_files_know_the_longest_translation_alone(tmp_path, length, expected):
    path = tmp_path / "model.safetensors"
    model_file.write(path, exported())
    rewritten(
        path,
        lambda metadata, tensors: metadata.pop("search") and metadata.update(trained_length=length),
    )
    assert model_file.read(path).search == expected


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(FileNotFoundError):
        model_file.read(path)
    with pytest.raises(IsADirectoryError):
        model_file.read(tmp_path)
    for content in (b"", b"text\n", b"PK\3\4" + bytes(100)):
        path.write_bytes(content)
        assert not model_file.is_model_file(path)
        with pytest.raises(ValueError, match="is damaged or no model of `lsq export`"):
            model_file.read(path)


def test_a_model_that_diverged_is_not_written(tmp_path):
    model = exported()
    model.model.tensors["decoder.embed_tokens.weight"][3, 3] = torch.nan
    with pytest.raises(ValueError, match="decoder.embed_tokens.weight holds NaN or infinity"):
        model_file.write(tmp_path / "model", model)
    assert not list(tmp_path.iterdir())


def test_words_that_are_twice_there_are_refused():
    model = exported()
    with pytest.raises(ValueError, match="a word is twice in the vocabulary of the decoder"):
        dataclasses.replace(model, target=("a", *model.target[1:-1], "a"))
