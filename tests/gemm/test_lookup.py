"""Lookups: the entry that serves a product, and the files that are used and warned of."""

import dataclasses
import logging
import threading
from pathlib import Path

import pytest

from lsq import gemm
from lsq.gemm import lookup
from lsq.gemm.configuration import default_tile
from lsq.gemm.configuration_file import SearchedFile
from lsq.gemm.lookup import Table
from tests.gemm.operands import asked
from tests.gemm.tuned import GPU, Machine, entry, file, key, tile

SMALL = tile(stages=2)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def searched_again():
    yield
    lookup.set_files(None)


def table(*entries):
    """A table of these entries, from one file."""
    return Table(GPU, [SearchedFile(path=Path("file.json"), file=file(*entries), refusal=None)])


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
    assert made.configuration(key(41)) == tile(stages=5)
    other = asked("project", 42, 128, 272)
    assert made.configuration(other) == default_tile(other, 90)
    assert made.configuration(asked("project_weight_gradient", 128, 128, 1001)) == SMALL
    other = asked("project_weight_gradient", 144, 128, 1024)
    assert made.configuration(other) == default_tile(other, 90)
    assert made.uses() == []


def test_uses_are_listed_once():
    made = table(entry(41), entry(1024))
    for m in (41, 1000, 1001, 1024, 7, 41):
        made.use(key(m))
    assert {use.key.m: use.hit for use in made.uses()} == {41: True, 1024: True, 7: False}


def test_the_nearest_batch_size_serves():
    stages = {8: 3, 16: 4, 1024: 5}
    made = table(*(entry(m, configuration=tile(stages=count)) for m, count in stages.items()))
    sizes = (1, 8, 9, 13, 600, 516, 5000)
    found = [made.use(key(m)).configuration.stages for m in sizes]
    assert found == [3, 3, 4, 4, 5, 5, 5]
    assert made.use(asked("project", 8, 64, 256)).entry is None
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
    assert lookup.loaded() is None
    assert lookup.table().use(key(41)).configuration == default_tile(key(41), 90)
    assert not lookup.table().used and lookup.table().here == GPU
    assert lookup.loaded() is lookup.table()


def test_files_complete_one_another(machine, caplog):
    machine.add(machine.user, "a", entry(9, configuration=SMALL), entry(10, configuration=SMALL))
    machine.add(machine.user, "b", entry(8), entry(9))
    found = lookup.table()
    held = {each.key.m: each.configuration.stages for each in found.file.entries}
    assert held == {8: 5, 9: 2, 10: 2} and found.file.validators == GPU
    assert not caplog.records and len(found.used) == 2


def test_explicit_files_are_the_only_ones_and_decide_at_once(machine, tmp_path):
    machine.add(machine.user, "a", entry(8))
    mine, other = (
        machine.add(tmp_path, "mine", entry(9)),
        machine.add(tmp_path, "other", entry(9), entry(10)),
    )
    lookup.set_files([mine, other])
    assert [each.key.m for each in lookup.table().file.entries] == [9, 10]
    assert gemm.cuda_tile("project", 9, 128, 256) == tile(stages=5)
    lookup.set_files([])
    assert gemm.cuda_tile("project", 8, 128, 256) == default_tile(key(8), 90)
    lookup.set_files(None)
    assert gemm.cuda_tile("project", 8, 128, 256) == tile(stages=5)


def test_an_explicit_file_of_another_device_is_an_error(machine, tmp_path):
    lookup.set_files([machine.add(tmp_path, "good", entry(9))])
    before = lookup.table()
    foreign = machine.add(
        tmp_path, "mine", entry(9), validators=dataclasses.replace(GPU, library_version="1.0")
    )
    message = (
        f"^{foreign}: library_version differs: the file says '1.0', here it is '13.0.*; tune here"
    )
    with pytest.raises(ValueError, match=message):
        lookup.set_files([foreign])
    with pytest.raises(FileNotFoundError):
        lookup.set_files([tmp_path / "none.json"])
    foreign.write_text("")
    with pytest.raises(ValueError, match="this is not JSON"):
        lookup.set_files([foreign])
    assert lookup.table() is before
    machine.gpu = None
    with pytest.raises(RuntimeError, match="there is no GPU here"):
        lookup.set_files([tmp_path / "good.json"])


def warnings(caplog):
    """The warnings of loading the table."""
    with caplog.at_level(logging.WARNING):
        lookup.load(GPU)
    return [record.getMessage() for record in caplog.records]


def test_one_warning_for_all_refused_files(machine, caplog):
    older = machine.add(
        machine.user, "a", entry(8), validators=dataclasses.replace(GPU, library_version="1.0")
    )
    foreign = machine.add(
        machine.user, "b", entry(8), validators=dataclasses.replace(GPU, device="Other GPU")
    )
    damaged = machine.user / "c.json"
    damaged.write_text("{")
    (message,) = warnings(caplog)
    assert f"{older}: library_version differs: the file says '1.0', here it is" in message
    assert f"{foreign}: device differs: the file says 'Other GPU', here it is" in message
    assert f"{damaged}: this is not JSON" in message and "lsq tune" in message


def test_a_file_beside_one_that_holds_is_expected(machine, caplog):
    machine.add(machine.user, "other", entry(8), validators=dataclasses.replace(GPU, sm=100))
    machine.add(machine.user, "here", entry(8))
    assert not warnings(caplog)


def test_the_packages_files_serve_after_the_users_and_may_be_for_other_devices(machine, caplog):
    other = dataclasses.replace(GPU, device="Other GPU")
    machine.add(machine.package, "other", entry(8), validators=other)
    machine.add(machine.package, "here", entry(8, configuration=SMALL), entry(9))
    assert not warnings(caplog)
    assert lookup.load(GPU).configuration(key(8)) == SMALL
    machine.add(machine.user, "mine", entry(8))
    loaded = lookup.load(GPU)
    assert loaded.configuration(key(8)) == loaded.configuration(key(9)) == tile(stages=5)
