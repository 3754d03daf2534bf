"""A training's products on a GPU follow from its options, and are those that it launches; by tuned
ones a training has the same bits and a report, and refuses files of other machines."""

import contextlib
import dataclasses
import logging
import shutil
from pathlib import Path

import pytest
import torch

from lsq import gemm
from lsq.fairseq.memory import build_training
from lsq.fairseq.products import (
    coverage,
    generation_programs,
    generation_rows,
    products_of_training,
    report_tuned,
    token_counts,
    training_programs,
)
from lsq.gemm import configuration_file, cpu, device, lookup
from lsq.gemm.configuration_file import ConfigurationFile, SearchedFile
from lsq.gemm.cublaslt import Products
from lsq.gemm.lookup import Table
from lsq.gemm.tuner import product_list
from lsq.native.launch import Product
from lsq.program.samples import placed
from tests.emulator.emulated_cublaslt import emulated
from tests.fairseq.comparison import assert_equal_states
from tests.gemm.operands import asked, matmul
from tests.gemm.tuned import GPU, entry, file, key, rows, tile

VOCABULARY = 75
PADDED = 80


def keys_of(parse, options="", **changes):
    given = {"backward": ["int8"], "tokens": [96], "rows": [10]} | changes
    return products_of_training(parse("--share-all-embeddings " + options), VOCABULARY, **given)


def prepared_for_cuda(programs):
    """The products that cuBLASLt, emulated, finds an algorithm for in what programs launch, if
    kernels end none."""
    with (
        contextlib.closing(Products(torch.device("cpu"), library=emulated().path)) as products,
        gemm.ended_by(None),
    ):
        entries = []
        for operation in (one for program in programs for one in program.operations):
            one = placed(operation, "cpu", torch.bfloat16)
            entries += one.cuda(
                *(torch.empty(shape, dtype=dtype) for shape, dtype in one.cuda_scratch())
            )
        return {products.prepare(entry).key for entry in entries if isinstance(entry, Product)}


def test_products_of_a_training(parse):
    """The gradient of fc2's input ends in a kernel of its own, and the logits of the loss do so
    always."""
    keys = keys_of(parse)
    weights = {"qkv": (96, 32), "out": (32, 32), "fc1": (48, 32), "fc2": (32, 48)}
    weights["key value"] = (64, 32)
    assert matmul(m=96, n=48, k=32) in keys
    for n, k in (*weights.values(), (PADDED, 32)):
        assert asked("project_input_gradient", 96, k, n) in keys or (n, k) == weights["fc2"]
        assert asked("project_weight_gradient", n, k, 96) in keys
        assert asked("project", 10, n, k) in keys
    for n, k in weights.values():
        assert asked("project", 96, n, k) in keys
    assert len(keys) == len(set(keys)) == 1 + 5 + 2 * 6 + 5


def test_batches_and_modes_add_up(parse):
    few = keys_of(parse, backward=["float"])
    assert {key.op for key in few} == {"project", "matmul"}
    both = keys_of(parse, backward=["float", "int8"], tokens=[96, 64], rows=[10, 5])
    assert set(both) == {
        key
        for backward in ("float", "int8")
        for tokens in (96, 64)
        for rows in (10, 5)
        for key in keys_of(parse, backward=[backward], tokens=[tokens], rows=[rows])
    }
    assert both.index(asked("project", 96, 32, 32)) < both.index(asked("project", 64, 32, 32))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("backward", ["float", "int8"])
@pytest.mark.parametrize("more", ["", "--lsq-mode float"])
def test_on_cuda_they_are_what_the_prepared_programs_launch(parse, backward, more):
    options = f"--lsq-clip-init fixed --lsq-backward {backward} {more}"
    given = parse(f"--share-all-embeddings {options}")
    _, model, criterion = build_training(given, VOCABULARY)
    programs = [*training_programs(model, criterion, 96), *generation_programs(model, 10)]
    keys = keys_of(parse, more, backward=[backward])
    assert len(keys) == len(set(keys))
    assert set(keys) == prepared_for_cuda(programs)


def test_other_architectures_are_refused(parse):
    with pytest.raises(ValueError, match="arch is 'transformer'; allowed: lsq_transformer"):
        keys_of(parse, "--arch transformer")


def test_token_counts_and_rows_of_generation():
    assert token_counts(4096, 1024) == [4096, 3072, 2048, 1024]
    assert token_counts(100, 32) == [100, 96, 64, 32] and token_counts(20, 32) == [20]
    with pytest.raises(ValueError, match="step is 100; .*multiple"):
        token_counts(4096, 100)
    assert generation_rows(5, 12) == [60, 40, 20, 10, 5] and generation_rows(1, 1) == [1]
    assert generation_rows(4, 400)[:3] == [1600, 512, 256]


BACKWARD = "--lsq-backward int8 --max-update 3"


@pytest.fixture(autouse=True)
def searched_again():
    yield
    gemm.set_files(None)


def table(*asked_for, tuned=(), here=GPU):
    """A table with entries for numbers of tokens, of which products were looked up."""
    entries = [entry(tokens, configuration=tile()) for tokens in tuned]
    found = SearchedFile(path=Path("/a.json"), file=file(*entries, validators=here), refusal=None)
    made = Table(here, [found] if tuned else [])
    for tokens in asked_for:
        made.use(key(tokens))
    return made


def test_coverage():
    name = "tuned products on Example GPU"
    assert coverage(table(8, 16, tuned=[16])) == (
        f"{name}: 1 of 2, 66.7% of the arithmetic, from /a.json; the largest other one is project 8"
        " x 128 x 256 (int8 to int32, nt)"
    )
    assert coverage(table(16, tuned=[16])) == (
        f"{name}: 1 of 1, 100.0% of the arithmetic, from /a.json"
    )
    assert coverage(table(8)) == (
        f"{name}: none, for there is no file for this device; lsq tune makes one"
    )


def test_products_of_every_device_that_ran_some_are_reported(monkeypatch, tmp_path, caplog):
    tables = [
        table(*asked_for, here=dataclasses.replace(GPU, device=name))
        for name, asked_for in {"A GPU": [8], "Other GPU": [16, 8], "Idle": []}.items()
    ]
    monkeypatch.setattr(lookup, "tables", lambda: tables)
    with caplog.at_level(logging.INFO):
        report_tuned(str(tmp_path / "missed.csv"))
    assert "products on A GPU" in caplog.text and "products on Other GPU" in caplog.text
    assert "Idle" not in caplog.text
    assert set(product_list.read(tmp_path / "missed.csv")) == {key(8), key(16)}


def test_nothing_is_listed_on_a_cpu(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(lookup, "tables", lambda: [Table(device.here("cpu"))])
    with caplog.at_level(logging.INFO):
        report_tuned(str(tmp_path / "missed.csv"))
    assert product_list.read(tmp_path / "missed.csv") == [] and not caplog.text


def written(path, *entries, **changes):
    """A file for this CPU, or for one with changes."""
    validators = dataclasses.replace(device.here("cpu"), **changes)
    configuration_file.write(path, ConfigurationFile(validators=validators, entries=entries))
    return path


@pytest.mark.thorough
def test_training_by_a_file_is_the_same_to_the_bit(train, tmp_path, monkeypatch):
    gemm.set_files([])
    sizes, original = set(), cpu.configuration_of
    monkeypatch.setattr(cpu, "configuration_of", lambda *size: sizes.add(size) or original(*size))
    plain = train(tmp_path / "plain", BACKWARD)["model"]
    keys = {asked(*size).rounded() for size in sizes}
    entries = [dataclasses.replace(entry(configuration=rows(32)), key=each) for each in keys]
    path = written(tmp_path / "tuned.json", *entries)
    tuned = train(tmp_path / "tuned", f"{BACKWARD} --lsq-gemm-config {path}")["model"]
    assert keys and [each.path for each in lookup.table().used] == [path]
    assert all(original(*size) == rows(32) for size in sizes)
    assert_equal_states(plain, tuned)


def test_a_file_of_another_machine_is_refused_with_the_reason(train, tmp_path):
    path = written(tmp_path / "other.json", device="Another CPU")
    with pytest.raises(ValueError, match="other.json.*device.*Another CPU"):
        train(tmp_path / "run", f"{BACKWARD} --lsq-gemm-config {path}")


@pytest.mark.parametrize("name", ["nowhere/missed.csv", "."])
def test_a_list_that_could_not_be_written_is_refused_before_the_training(train, tmp_path, name):
    with pytest.raises(
        ValueError, match="--lsq-gemm-coverage .* cannot be written; name a file in a folder"
    ):
        train(tmp_path / "run", f"{BACKWARD} --lsq-gemm-coverage {tmp_path / name}")
    assert not list((tmp_path / "run").glob("*.pt"))
