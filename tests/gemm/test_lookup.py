"""Lookups: the entry that serves a product, and the files that are used and warned of."""

import dataclasses
import logging
import threading
from pathlib import Path

import pytest
from lsq.gemm.default_tile import default_tile

from lsq import gemm
from lsq.gemm import cpu, lookup
from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.configuration_file import SearchedFile
from lsq.gemm.lookup import Table
from lsq.native import tiles
from tests.gemm.operands import asked
from tests.gemm.tuned import CPU, GPU, Machine, cublas_entry, entry, file, key, rows

DEFAULT = rows(0, "avx512_vnni")
SMALL = rows(32)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def instructions(monkeypatch):
    monkeypatch.setattr(tiles, "usable", lambda: ("avx512_vnni", "plain"))
    yield
    gemm.set_files(None)


def table(*entries):
    """A table of these entries, from one file."""
    return Table(CPU, [SearchedFile(path=Path("file.json"), file=file(*entries), refusal=None)])


def test_exact_up_to_512_then_the_next_multiple_of_32():
    made = table(entry(41), entry(1024))
    served = {m: made.use(key(m)).entry for m in (40, 41, 42, 512, 992, 993, 1000, 1024, 1025)}
    hits = [use.key.m for use in made.uses() if use.hit]
    assert sorted(hits) == [41, 1024]
    assert served[993] is served[1000] is served[1024] and served[41].key == key(41)


@pytest.mark.parametrize(
    "changes", [{"n": 144}, {"k": 272}, {"op": "project_input_gradient"}, {"op": "matmul"}]
)
def test_all_else_must_be_the_same(changes):
    assert table(entry(41)).use(key(41, **changes)).entry is None


def test_configuration():
    made = table(entry(41), entry(op="project_weight_gradient", m=128, k=1024, configuration=SMALL))
    assert made.configuration(key(41)) == rows(96)
    assert made.configuration(asked("project", 42, 128, 272)) == DEFAULT
    assert made.configuration(asked("project_weight_gradient", 128, 128, 1001)) == SMALL
    assert made.configuration(asked("project_weight_gradient", 144, 128, 1001)) == DEFAULT
    assert made.uses() == []
    on_gpu = Table(GPU)
    assert on_gpu.use(key(41)).configuration == default_tile(key(41), 90)


def test_uses_are_listed_once():
    made = table(entry(41), entry(1024))
    for m in (41, 1000, 1001, 1024, 7, 41):
        made.use(key(m))
    assert {use.key.m: use.hit for use in made.uses()} == {41: True, 1024: True, 7: False}


def test_the_nearest_batch_size_serves():
    made = table(*(entry(m, configuration=rows(32 * m)) for m in (8, 16, 1024)))
    sizes = (1, 8, 9, 13, 600, 516, 5000)
    found = [made.use(key(m)).configuration.rows // 32 for m in sizes]
    assert found == [8, 8, 16, 16, 1024, 1024, 1024]
    assert made.use(asked("project", 8, 64, 256)).configuration == DEFAULT
    served = {use.key.m: use.entry.key.m for use in made.uses() if use.entry}
    assert served == {1: 8, 8: 8, 9: 16, 13: 16, 608: 1024, 544: 1024, 5024: 1024}


def test_threads_lose_no_product():
    made = table(entry(41))
    threads = [
        threading.Thread(target=lambda: [made.use(key(m)) for m in range(1, 400)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [use.key.m for use in made.uses()] == list(range(1, 400))


def test_without_any_file(machine):
    assert lookup.table().use(key(41)).configuration == DEFAULT == CpuConfiguration.default()
    assert not lookup.table().used and lookup.table().here == CPU


def test_files_complete_one_another(machine, caplog):
    machine.add(machine.user, "a", entry(9, configuration=SMALL), entry(10, configuration=SMALL))
    machine.add(machine.user, "b", entry(8), entry(9))
    found = lookup.table()
    held = {each.key.m: each.configuration.rows for each in found.file.entries}
    assert held == {8: 96, 9: 32, 10: 32} and found.file.validators == CPU
    assert not caplog.records and len(found.used) == 2


def test_the_table_is_loaded_once(machine):
    assert lookup.table() is lookup.table("cpu")
    with pytest.raises(RuntimeError, match="there is no cuda here"):
        lookup.table("cuda")


def test_explicit_files_are_the_only_ones_and_decide_at_once(machine, tmp_path):
    machine.add(machine.user, "a", entry(8))
    mine, other = (
        machine.add(tmp_path, "mine", entry(9)),
        machine.add(tmp_path, "other", entry(9), entry(10)),
    )
    gemm.set_files([mine, other])
    assert [each.key.m for each in lookup.table().file.entries] == [9, 10]
    assert cpu.configuration_of("project", 9, 128, 256) == rows(96)
    gemm.set_files([])
    assert cpu.configuration_of("project", 8, 128, 256) == DEFAULT
    gemm.set_files(None)
    assert cpu.configuration_of("project", 8, 128, 256) == rows(96)


def test_an_explicit_file_of_another_device_is_an_error(machine, tmp_path):
    gemm.set_files([machine.add(tmp_path, "good", entry(9))])
    before = lookup.table()
    foreign = machine.add(
        tmp_path, "mine", entry(9), validators=dataclasses.replace(CPU, library_version="1.0")
    )
    message = (
        f"^{foreign}: library_version differs: the file says '1.0', here it is '3.7.*; tune here"
    )
    with pytest.raises(ValueError, match=message):
        gemm.set_files([foreign])
    with pytest.raises(RuntimeError, match="there is no cuda here"):
        gemm.set_files([machine.add(tmp_path, "gpu", cublas_entry(), validators=GPU)])
    with pytest.raises(FileNotFoundError):
        gemm.set_files([tmp_path / "none.json"])
    foreign.write_text("")
    with pytest.raises(ValueError, match="this is not JSON"):
        gemm.set_files([foreign])
    assert lookup.table() is before


def test_explicit_files_of_both_kinds(machine, tmp_path):
    machine.here["cuda"] = GPU
    files = [
        machine.add(tmp_path, "gpu", cublas_entry(), validators=GPU),
        machine.add(tmp_path, "cpu", entry(9)),
    ]
    gemm.set_files(files)
    assert lookup.table("cuda").file.entries == (cublas_entry(),)
    assert lookup.table("cpu").file.entries == (entry(9),)
    gemm.set_files(files[1:])
    assert lookup.table("cuda").file.entries == ()


def warnings(caplog):
    """The warnings of loading the table twice."""
    with caplog.at_level(logging.WARNING):
        lookup.load(CPU)
        lookup.load(CPU)
    return [record.getMessage() for record in caplog.records]


def test_one_warning_for_all_refused_files(machine, caplog):
    older = machine.add(
        machine.user, "a", entry(8), validators=dataclasses.replace(CPU, library_version="1.0")
    )
    foreign = machine.add(
        machine.user, "b", entry(8), validators=dataclasses.replace(CPU, device="Other CPU")
    )
    damaged = machine.user / "c.json"
    damaged.write_text("{")
    machine.add(machine.user, "d", cublas_entry(), validators=GPU)
    (message,) = warnings(caplog)
    assert f"{older}: library_version differs: the file says '1.0', here it is '3.7.1'; " in message
    assert (
        f"{foreign}: device differs: the file says 'Other CPU', here it is 'Example CPU'; "
        in message
    )
    assert f"{damaged}: this is not JSON" in message and "lsq tune" in message
    assert "d.json" not in message


def test_a_file_beside_one_that_holds_is_expected(machine, caplog):
    machine.add(
        machine.user, "one_thread", entry(8), validators=dataclasses.replace(CPU, threads=1)
    )
    machine.add(machine.user, "two_threads", entry(8))
    assert not warnings(caplog)


def test_the_packages_files_serve_after_the_users_and_may_be_for_other_devices(machine, caplog):
    other = dataclasses.replace(CPU, device="Other CPU")
    machine.add(machine.package, "other", entry(8), validators=other)
    machine.add(machine.package, "here", entry(8, configuration=SMALL), entry(9))
    assert not warnings(caplog)
    assert lookup.load(CPU).configuration(key(8)) == SMALL
    machine.add(machine.user, "mine", entry(8))
    loaded = lookup.load(CPU)
    assert loaded.configuration(key(8)) == rows(96) and loaded.configuration(key(9)) == rows(96)


def test_a_kernel_that_cannot_run_here_is_refused_with_its_number(machine, caplog):
    path = machine.add(machine.user, "a", entry(8), entry(16, configuration=rows(0, "amx")))
    named = (
        r"a.json: entries\[1\].configuration.kernel is 'amx', which cannot run here; allowed:"
        r" 'avx512_vnni'"
    )
    with pytest.raises(ValueError, match=named + ".*; tune here"):
        lookup.set_files([path])
    lookup.set_files(None)
    (message,) = warnings(caplog)
    assert "not used: " in message and "'amx', which cannot run here" in message
    assert not lookup.table().used
