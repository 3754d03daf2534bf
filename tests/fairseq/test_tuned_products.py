"""Training by tuned products: the same bits, a report of what was tuned, and files of other
machines refused."""

import dataclasses
import gc
import logging

import pytest
import torch

from lsq import gemm
from lsq.fairseq import tuned_products
from lsq.gemm import configuration_file, device, lookup
from lsq.gemm.configuration import CpuConfiguration, Entry, Times, now
from lsq.gemm.configuration_file import ConfigurationFile
from lsq.gemm.product_key import ProductKey
from lsq.gemm.tuner import coverage, product_list

BACKWARD = "--lsq-backward int8 --max-update 3"


@pytest.fixture(autouse=True)
def searched_again():
    yield
    gemm.set_files(None)


def tuned_file(path, keys, **changes):
    """A file for this CPU that runs each product a few rows at a time, with b copied."""
    entries = [
        Entry(
            key=key,
            configuration=CpuConfiguration(rows=24, b_layout="padded"),
            spread=0.01,
            date=now(),
            times=Times(chosen=1.0, default=2.0, float=3.0),
        )
        for key in keys
    ]
    validators = dataclasses.replace(device.here("cpu"), **changes)
    configuration_file.write(path, ConfigurationFile(validators=validators, entries=tuple(entries)))
    return path


@pytest.mark.thorough
def test_training_is_the_same_to_the_bit_and_says_what_was_tuned(train, tmp_path, caplog):
    gemm.set_files([])
    listed = tmp_path / "missed.csv"
    with caplog.at_level(logging.INFO):
        plain = train(tmp_path / "plain", f"{BACKWARD} --lsq-gemm-coverage {listed}")["model"]
        gc.collect()  # the report comes when fairseq's task goes, and cycles keep that
    missed = product_list.read(listed)
    assert {
        use.key for use in lookup.table().uses() if use.seconds > 0 and use.entry is None
    } == set(missed)
    assert missed and "no file for this device; lsq tune makes one" in caplog.text

    path = tuned_file(tmp_path / "tuned.json", missed)
    tuned = train(
        tmp_path / "tuned", f"{BACKWARD} --lsq-gemm-config {path} --lsq-gemm-coverage {listed}"
    )["model"]
    gc.collect()
    assert product_list.read(listed) == [] and coverage.shares(lookup.table(), "calls") == (
        1.0,
        0.0,
    )
    assert [each.path for each in lookup.table().used] == [path]
    assert all(torch.equal(plain[name], tuned[name]) for name in plain)


def test_products_of_every_device_that_ran_some_are_reported(monkeypatch, tmp_path, caplog):
    here = device.here("cpu")
    cpu, gpu, idle = (
        lookup.Table(dataclasses.replace(here, device=name))
        for name in ("A CPU", "A GPU", "Another")
    )
    keys = [ProductKey(op="project", m=48, n=32, k=16), ProductKey(op="project", m=48, n=64, k=16)]
    for table, asked in ((cpu, keys[:1]), (gpu, keys)):
        for key in asked:
            table.use(key)
    monkeypatch.setattr(lookup, "tables", lambda: [cpu, gpu, idle])
    with caplog.at_level(logging.INFO):
        tuned_products.report(str(tmp_path / "missed.csv"))
    assert (
        "products on A CPU" in caplog.text
        and "products on A GPU" in caplog.text
        and "Another" not in caplog.text
    )
    assert set(product_list.read(tmp_path / "missed.csv")) == set(keys)


def test_a_file_of_another_machine_is_refused_with_the_reason(train, tmp_path):
    path = tuned_file(tmp_path / "other.json", [], device="Another CPU")
    with pytest.raises(ValueError, match="other.json.*device.*Another CPU"):
        train(tmp_path / "run", f"{BACKWARD} --lsq-gemm-config {path}")


@pytest.mark.parametrize("name", ["nowhere/missed.csv", "."])
def test_a_list_that_could_not_be_written_is_refused_before_the_training(train, tmp_path, name):
    with pytest.raises(
        ValueError, match="--lsq-gemm-coverage .* cannot be written; name a file in a folder"
    ):
        train(tmp_path / "run", f"{BACKWARD} --lsq-gemm-coverage {tmp_path / name}")
    assert not list((tmp_path / "run").glob("*.pt"))
