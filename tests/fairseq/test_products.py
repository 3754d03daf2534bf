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
from lsq.fairseq import products as of_training
from lsq.fairseq.memory import build_training
from lsq.fairseq.products import (
    generation_programs,
    generation_rows,
    products_of_training,
    token_counts,
    training_programs,
)
from lsq.gemm import cuda, lookup
from lsq.gemm.configuration_file import SearchedFile
from lsq.gemm.cublaslt import Products
from lsq.gemm.lookup import Table
from lsq.gemm.tuner import product_list
from lsq.native.launch import Product
from lsq.program.samples import placed
from tests.emulator.emulated_cublaslt import emulated
from tests.gemm.operands import asked, matmul
from tests.gemm.tuned import GPU, Machine, entry, file, key, tile

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
    lookup.set_files(None)


def table(*asked_for, tuned=()):
    """A table with entries for numbers of tokens, of which products were looked up."""
    entries = [entry(tokens, configuration=tile()) for tokens in tuned]
    found = SearchedFile(path=Path("/a.json"), file=file(*entries), refusal=None)
    made = Table(GPU, [found] if tuned else [])
    for tokens in asked_for:
        made.use(key(tokens))
    return made


def test_coverage():
    name = "tuned products on Example GPU"
    assert of_training.coverage(table(8, 16, tuned=[16])) == (
        f"{name}: 1 of 2, 66.7% of the arithmetic, from /a.json; the largest other one is project 8"
        " x 128 x 256 (int8 to int32, nt)"
    )
    assert of_training.coverage(table(16, tuned=[16])) == (
        f"{name}: 1 of 1, 100.0% of the arithmetic, from /a.json"
    )
    assert of_training.coverage(table(8)) == (
        f"{name}: none, for there is no file for this device; lsq tune makes one"
    )


def test_products_that_ran_are_reported(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cuda.files, "table", table(8, 16, tuned=[16]))
    with caplog.at_level(logging.INFO):
        of_training.report_tuned(str(tmp_path / "missed.csv"))
    assert "products on Example GPU" in caplog.text
    assert product_list.read(tmp_path / "missed.csv") == [key(8)]


@pytest.mark.parametrize("made", [None, table()])
def test_nothing_is_listed_where_no_gpu_ran(monkeypatch, tmp_path, caplog, made):
    monkeypatch.setattr(cuda.files, "table", made)
    with caplog.at_level(logging.INFO):
        of_training.report_tuned(str(tmp_path / "missed.csv"))
    assert product_list.read(tmp_path / "missed.csv") == [] and not caplog.text


def test_a_file_of_another_machine_is_refused_with_the_reason(train, tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, dataclasses.replace(GPU, device="Another GPU"))
    path = machine.add(tmp_path, "other")
    with pytest.raises(ValueError, match="other.json.*device.*Another GPU"):
        train(tmp_path / "run", f"{BACKWARD} --lsq-gemm-config {path}")


@pytest.mark.parametrize("name", ["nowhere/missed.csv", "."])
def test_a_list_that_could_not_be_written_is_refused_before_the_training(train, tmp_path, name):
    with pytest.raises(
        ValueError, match="--lsq-gemm-coverage .* cannot be written; name a file in a folder"
    ):
        train(tmp_path / "run", f"{BACKWARD} --lsq-gemm-coverage {tmp_path / name}")
    assert not list((tmp_path / "run").glob("*.pt"))
