"""Training by tuned products: a report of what was tuned, and files of other machines refused."""

import dataclasses
import logging
from pathlib import Path

import pytest

from lsq.fairseq import products
from lsq.gemm import cuda, lookup
from lsq.gemm.configuration_file import SearchedFile
from lsq.gemm.lookup import Table
from lsq.gemm.tuner import product_list
from tests.gemm.tuned import GPU, Machine, entry, file, key, tile

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
    assert products.coverage(table(8, 16, tuned=[16])) == (
        f"{name}: 1 of 2, 66.7% of the arithmetic, from /a.json; the largest other one is project 8"
        " x 128 x 256 (int8 to int32, nt)"
    )
    assert products.coverage(table(16, tuned=[16])) == (
        f"{name}: 1 of 1, 100.0% of the arithmetic, from /a.json"
    )
    assert products.coverage(table(8)) == (
        f"{name}: none, for there is no file for this device; lsq tune makes one"
    )


def test_products_that_ran_are_reported(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cuda.files, "table", table(8, 16, tuned=[16]))
    with caplog.at_level(logging.INFO):
        products.report_tuned(str(tmp_path / "missed.csv"))
    assert "products on Example GPU" in caplog.text
    assert product_list.read(tmp_path / "missed.csv") == [key(8)]


@pytest.mark.parametrize("made", [None, table()])
def test_nothing_is_listed_where_no_gpu_ran(monkeypatch, tmp_path, caplog, made):
    monkeypatch.setattr(cuda.files, "table", made)
    with caplog.at_level(logging.INFO):
        products.report_tuned(str(tmp_path / "missed.csv"))
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
