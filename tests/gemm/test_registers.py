"""Files of the rows that registers multiply: what is written is read here, and nowhere else."""

import json

import pytest
import torch

from lsq.gemm import registers
from lsq.gemm.registers import BY_RULE, KINDS, Tuned, kind_of, most_rows
from lsq.native import tiles
from lsq.ops.packed_weight import PackedWeight
from lsq.quant.numbers import NUMBER_FORMATS
from lsq.quant.stored import Decode, stored_type
from tests.ops.compare import refused

TWO = [Tuned(kind="2", instructions=tiles.fastest(), rows=7, gain=1.25)]
TWO += [Tuned(kind="4 bytes", instructions="avx_vnni", rows=0, gain=1.0)]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    registers._tuned.cache_clear()
    yield tmp_path
    registers._tuned.cache_clear()


def test_every_stored_type_has_a_kind():
    """But for words, whose sums hold 256 products: they are always groups."""
    for make in NUMBER_FORMATS.values():
        stored = stored_type(make())
        if stored.decode in (Decode.AFFINE, Decode.BYTES):
            assert kind_of(stored.bits, stored.decode.value) in KINDS
    assert len(set(KINDS)) == len(KINDS) == 12


def test_weights_take_what_was_tuned():
    assert most_rows("2", tiles.fastest()) == BY_RULE
    registers.write(registers.path(), TWO)
    codes, stored = torch.zeros(8, 64, dtype=torch.uint8), stored_type(NUMBER_FORMATS["int2"]())
    found = PackedWeight.of_stored(codes, torch.ones(8), stored)
    assert found.registers == most_rows("2", tiles.fastest()) == 7
    found = PackedWeight.of_stored(codes, torch.ones(8, 2), stored, group=32)
    assert found.registers == BY_RULE
    assert most_rows("4 bytes", "avx_vnni") == 0 and most_rows("3", "amx") == BY_RULE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.update(processor="another"), "processor is 'another'; here it is"),
        (lambda file: file.update(format=2), "format is 2; here it is 1"),
        (lambda file: file.pop("entries"), "has no field 'entries'"),
        (lambda file: file["entries"][0].update(kind="9"), "kind is '9'"),
        (lambda file: file["entries"][0].update(rows=17), "rows is 17"),
        (lambda file: file["entries"][0].update(rows=True), "rows is True"),
        (lambda file: file["entries"][0].update(gain=-1), "gain is -1"),
        (lambda file: file["entries"][0].update(more=1), "unknown field"),
    ],
)
def test_other_files_are_named_once_and_not_used(change, reason, caplog):
    registers.write(registers.path(), TWO)
    content = json.loads(registers.path().read_text())
    change(content)
    registers.path().write_text(json.dumps(content))
    registers._tuned.cache_clear()
    with refused(reason):
        registers.read(registers.path())
    assert most_rows("2", tiles.fastest()) == most_rows("2", tiles.fastest()) == BY_RULE
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("not used: ") and "lsq tune --device cpu" in said


def test_folders_that_may_not_be_read_are_named_and_not_used(monkeypatch, caplog):
    def stat(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(registers.Path, "stat", stat)
    assert most_rows("2", tiles.fastest()) == BY_RULE
    assert "Permission denied" in caplog.text
