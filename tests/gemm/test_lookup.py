"""Lookups: which entry serves which product, what is counted, what memory suffices, which files are
warned of."""

import dataclasses
import itertools
import logging
import threading
import time
from pathlib import Path

import pytest

from lsq import gemm
from lsq.gemm import cpu_product, lookup
from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.configuration_file import Found
from lsq.gemm.lookup import Table
from lsq.gemm.product_key import REQUESTS
from lsq.native import tiles
from tests.gemm.operands import asked
from tests.gemm.tuned import CPU, GPU, Machine, cublas_entry, entry, file, key

DEFAULT = CpuConfiguration(rows=512)
SMALL = CpuConfiguration(rows=32)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def table(*entries):
    """A table of these entries, from one file."""
    return Table(
        CPU, [Found(path=Path("file.json"), source="user", file=file(*entries), refusal=None)]
    )


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


@pytest.fixture(autouse=True)
def no_tiles(monkeypatch):
    """A processor without instructions for tiles: oneDNN is the default."""
    monkeypatch.setattr(tiles, "usable", lambda: ())


def test_configuration():
    made = table(entry(41), entry(op="project_weight_gradient", m=128, k=1024, configuration=SMALL))
    assert made.use(key(41)).configuration == CpuConfiguration(rows=96)
    assert made.use(asked("project", 42, 128, 272)).configuration == DEFAULT
    assert made.use(asked("project_weight_gradient", 128, 128, 1001)).configuration == SMALL
    assert made.use(
        asked("project_weight_gradient", 144, 128, 1001)
    ).configuration == CpuConfiguration(rows=4096)


def test_counts():
    made = table(entry(41), entry(1024))
    for m in (41, 1000, 1001, 1024, 7):
        made.use(key(m))
    for m, seconds in ((41, 0.5), (1001, 0.25), (1002, 0.25)):
        made.add_seconds(made.use(key(m)), seconds)
    uses = {use.key.m: (use.hit, use.calls, use.seconds) for use in made.uses()}
    assert uses == {41: (True, 2, 0.5), 1024: (True, 5, 0.5), 7: (False, 1, 0.0)}


def test_the_nearest_batch_size_serves_on_the_cpu():
    made = table(*(entry(m, configuration=CpuConfiguration(rows=m)) for m in (8, 16, 1024)))
    sizes = (1, 8, 9, 13, 600, 516, 5000)
    found = [made.use(key(m)).configuration.rows for m in sizes]
    assert found == [8, 8, 16, 16, 1024, 1024, 1024]
    assert made.use(asked("project", 8, 64, 256)).configuration == DEFAULT
    assert {use.key.m: use.entry.key.m for use in made.uses() if use.entry} == {
        1: 8,
        8: 8,
        9: 16,
        13: 16,
        608: 1024,
        544: 1024,
        5024: 1024,
    }


def test_largest_scratch():
    hungry = CpuConfiguration(rows=0)
    made = table(
        entry(64, configuration=hungry),
        entry(1024, configuration=hungry),
        entry(2048, configuration=SMALL),
    )
    for m, rows in {
        10: 10,
        63: 63,
        64: 64,
        512: 512,
        992: 992,
        993: 993,
        1024: 1024,
        4096: 1024,
    }.items():
        assert made.largest_scratch(key(m)) == rows * 128 * 4


@pytest.mark.parametrize("op", REQUESTS)
def test_memory_for_the_largest_batch_serves_every_smaller_one(op):
    """Whatever entries there are: no size falls with the batch, and what a batch needs was
    there."""
    layout = REQUESTS[op].layout
    kinds = [CpuConfiguration(rows=rows) for rows in (0, 48, 1000)]
    kinds += [CpuConfiguration(b_layout="nk" if layout[1] == "n" else "kn")]
    base = asked(op, 40, 24, 40)
    tokens = [*range(1, 200, 13), *range(500, 1100, 32)]
    made = {
        base.with_tokens(size).rounded(): kinds[place % len(kinds)]
        for place, size in enumerate(tokens)
    }
    entries = [
        dataclasses.replace(entry(), key=each, configuration=kind) for each, kind in made.items()
    ]
    found = table(*entries)
    before = 0
    for size in range(1, 1100):
        key = base.with_tokens(size)
        largest = found.largest_scratch(key)
        assert largest >= before
        before = largest
        needed = cpu_product.scratch_bytes(key, found.use(key).configuration)
        assert needed <= largest


def test_a_lookup_is_fast():
    made, wanted = table(entry(41)), key(41)
    made.use(wanted)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            made.use(wanted)
        times.append((time.perf_counter() - start) / 500)
    assert min(times) < 2e-6


def test_threads_lose_no_count():
    made = table(entry(41))

    def ask():
        for m in itertools.islice(itertools.cycle(range(38, 44)), 3000):
            made.use(key(m))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {use.key.m: use.calls for use in made.uses()} == dict.fromkeys(range(38, 44), 2000)


def test_without_any_file(machine):
    assert lookup.table().use(key(41)).configuration == DEFAULT
    assert lookup.table().largest_scratch(key(41)) == 41 * 128 * 4
    assert not lookup.table().used and lookup.table().here == CPU


def test_files_complete_one_another(machine, caplog):
    machine.add(machine.package, "a", entry(8), entry(9))
    machine.add(machine.user, "a", entry(9, configuration=SMALL), entry(10, configuration=SMALL))
    found = lookup.table()
    assert {each.key.m: each.configuration.rows for each in found.file.entries} == {
        8: 96,
        9: 32,
        10: 32,
    }
    assert found.file.validators == CPU
    assert not caplog.records
    assert len(lookup.table().used) == 2


def test_the_table_is_loaded_once(machine):
    assert lookup.table() is lookup.table("cpu")
    with pytest.raises(RuntimeError, match="there is no cuda here"):
        lookup.table("cuda")


def test_explicit_files_are_the_only_ones(machine, tmp_path):
    machine.add(machine.user, "a", entry(8))
    mine, other = (
        machine.add(tmp_path, "mine", entry(9)),
        machine.add(tmp_path, "other", entry(9), entry(10)),
    )
    gemm.set_files([mine, other])
    assert [each.key.m for each in lookup.table().file.entries] == [9, 10]
    gemm.set_files([])
    assert lookup.table().use(key(8)).configuration == DEFAULT
    gemm.set_files(None)
    assert lookup.table().use(key(8)).configuration != DEFAULT


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
    """What was warned of when the table was loaded, twice."""
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


def test_files_of_the_package_for_other_devices_are_expected(machine, caplog):
    machine.add(
        machine.package, "a", entry(8), validators=dataclasses.replace(CPU, device="Other CPU")
    )
    machine.add(machine.package, "b", cublas_entry(), validators=GPU)
    machine.add(
        machine.package, "c", entry(8), validators=dataclasses.replace(CPU, features=("avx2",))
    )
    assert not warnings(caplog)
    machine.add(
        machine.package, "d", entry(8), validators=dataclasses.replace(CPU, library_version="1.0")
    )
    (message,) = warnings(caplog)
    assert message.count(".json") == 1 and "d.json: library_version differs" in message


def test_a_file_beside_one_that_holds_is_expected(machine, caplog):
    machine.add(
        machine.user, "one_thread", entry(8), validators=dataclasses.replace(CPU, threads=1)
    )
    machine.add(machine.user, "two_threads", entry(8))
    assert not warnings(caplog)


def test_a_kernel_that_cannot_run_here_is_refused_with_its_place(machine, caplog):
    path = machine.add(
        machine.user, "a", entry(8), entry(16, configuration=CpuConfiguration(kernel="amx"))
    )
    named = (
        r"a.json: entries\[1\].configuration.kernel is 'amx', which cannot run here; allowed:"
        r" 'onednn'"
    )
    with pytest.raises(ValueError, match=named + "; tune here"):
        lookup.set_files([path])
    lookup.set_files(None)
    (message,) = warnings(caplog)
    assert "not used: " in message and "'amx', which cannot run here" in message
    assert not lookup.table().used
