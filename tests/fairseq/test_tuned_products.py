"""Training by tuned products: the same bits, a report of what was tuned, and files of other
machines refused."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from lsq import gemm
from lsq.fairseq import tuned_products
from lsq.gemm import configuration_file, cpu, device, lookup
from lsq.gemm.configuration_file import ConfigurationFile, SearchedFile
from lsq.gemm.lookup import Table
from lsq.gemm.tuner import product_list
from tests.gemm.operands import asked
from tests.gemm.tuned import GPU, entry, file, key, rows, tile

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
    assert tuned_products.coverage(table(8, 16, tuned=[16])).splitlines() == [
        "tuned products on Example GPU: 2 products",
        "  products: 50.0% tuned, 50.0% as the nearest batch size, 0.0% not",
        "  arithmetic: 66.7% tuned, 33.3% as the nearest batch size, 0.0% not",
        "  from /a.json",
        "  missed project 8 x 128 x 256 (int8 to int32, nt): ran as 16 tokens",
    ]
    assert tuned_products.coverage(table(8)) == (
        "tuned products on Example GPU: none, for there is no file for this device; lsq tune makes"
        " one"
    )
    lines = tuned_products.coverage(table(*range(1, 31), tuned=[64])).splitlines()
    assert "project 30 x" in lines[4] and lines[-1] == "  and 20 more"


def test_products_of_every_device_that_ran_some_are_reported(monkeypatch, tmp_path, caplog):
    tables = [
        table(*asked_for, here=dataclasses.replace(GPU, device=name))
        for name, asked_for in {"A GPU": [8], "Other GPU": [16, 8], "Idle": []}.items()
    ]
    monkeypatch.setattr(lookup, "tables", lambda: tables)
    with caplog.at_level(logging.INFO):
        tuned_products.report(str(tmp_path / "missed.csv"))
    assert "products on A GPU" in caplog.text and "products on Other GPU" in caplog.text
    assert "Idle" not in caplog.text
    assert set(product_list.read(tmp_path / "missed.csv")) == {key(8), key(16)}


def test_nothing_is_listed_on_a_cpu(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(lookup, "tables", lambda: [Table(device.here("cpu"))])
    with caplog.at_level(logging.INFO):
        tuned_products.report(str(tmp_path / "missed.csv"))
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
    assert all(torch.equal(plain[name], tuned[name]) for name in plain)


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
