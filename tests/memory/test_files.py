import json
import random
from dataclasses import replace

import pytest

from lsq.memory.buffer import Buffer
from lsq.memory.files import load_plan, read_buffers, save_plan, write_buffers, write_plan
from lsq.memory.planner import plan
from tests.memory.instances import buffers_of, random_buffers


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.csv"


def test_read(path):
    path.write_text("id,lower,upper,size,alignment\na,0,3,10,64\nb,-1,2,0,\n")
    assert read_buffers(path, alignment=8) == [
        Buffer(name="a", size=10, first=0, last=2, alignment=64),
        Buffer(name="b", size=0, first=-1, last=1, alignment=8),
    ]


def test_columns_may_stand_in_any_order(path):
    path.write_text("size,id,more,upper,lower\n10,a,?,3,0\n")
    assert read_buffers(path) == buffers_of((10, 0, 2))


def test_buffers_survive_a_round_trip(path):
    buffers = random_buffers(random.Random(1), 30)
    write_buffers(buffers, path)
    assert read_buffers(path) == buffers
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("change", [{"alias": "b"}, {"offset": 0}, {"pool": "p"}])
def test_what_a_file_cannot_hold_is_refused(path, change):
    with pytest.raises(ValueError, match="'a' has an alias, an offset or a pool"):
        write_buffers([replace(buffers_of((1, 0, 0))[0], **change)], path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no column id, lower, upper, size"),
        ("id,lower,size\n", "line 1: no column upper in 'id,lower,size'"),
        ("id,lower,upper,size\n", "has no buffers"),
        ("id,lower,upper,size\na,0,1,2\nb,0,1\n", "line 3: the row has not as many values"),
        ("id,lower,upper,size\na,0,1,2,3\n", "line 2: the row has not as many values"),
        ("id,lower,upper,size\na,0,1,two\n", "line 2: size is 'two'"),
        ("id,lower,upper,size\na,0,1,1_0\n", "line 2: size is '1_0'; it must be a whole number"),
        ("id,lower,upper,size\na,0,1, 2\n", "line 2: size is ' 2'"),
        ("id,lower,upper,size\na,0,1,\xb2\n", "is not a CSV file"),
        ("id,lower,upper,size\na,0,1," + "9" * 5000 + "\n", "line 2: size is 9{100}; it must be at most 2"),
        ("id,lower,upper,size\na,0,1,-2\n", "line 2: buffer 'a': size is -2"),
        ("id,lower,upper,size\na,0,1,4611686018427387905\n", "line 2: size is 4611686018427387905; it must be at most"),
        ("id,lower,upper,size\na,3,3,2\n", "line 2: upper is 3; it must be above lower, which is 3"),
        ("id,lower,upper,size\na,0,1,2\nb,0,1,2\na,0,1,2\n", "line 4: id 'a' stands in line 2 already"),
        ("id,lower,upper,size,alignment\na,0,1,2,3\n", "line 2: buffer 'a': alignment is 3"),
        ("\xff\xfe", "is not a CSV file"),
    ],
)
def test_mistakes_are_named_with_their_line(path, text, message):
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        read_buffers(path)


def test_write_plan(path):
    write_plan(plan(buffers_of((4, 0, 1), (2, 1, 2))), path)
    assert path.read_text() == "id,offset,segment\na,0,0\nb,4,0\n"


def test_a_plan_survives_a_round_trip(path):
    for options in ({}, {"capacity": 10**6}, {"cap": 2000}):
        made = plan(random_buffers(random.Random(2), 20), **options)
        save_plan(made, path)
        assert load_plan(path) == made


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"used": [], "capacities": [], "pools": []}'])
def test_other_files_are_no_plans(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a plan that save_plan wrote"):
        load_plan(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offsets", {"a": "0"}, "'0' stands where a whole number"),
        ("segments", {"a": True}, "True stands where a whole number"),
        ("used", [2**63], "9223372036854775808 stands where"),
        ("capacities", [], "1 used, 0 capacities and 1 pools"),
        ("pools", [None], "None stands where a name"),
        ("lower_bound", 1.5, "1.5 stands where"),
        ("seconds", float("nan"), "seconds is nan"),
        ("capacity_met", "yes", "capacity_met is 'yes'"),
        ("offsets", [0], "no attribute"),
    ],
)
def test_fields_of_other_types_are_named(path, field, value, message):
    save_plan(plan(buffers_of((4, 0, 1))), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"is not a plan that save_plan wrote .*{message}"):
        load_plan(path)


def test_a_failed_write_leaves_the_file_as_it_was(path, monkeypatch):
    path.write_text("before")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("lsq.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_plan(plan(buffers_of((4, 0, 1))), path)
    assert path.read_text() == "before" and len(list(path.parent.iterdir())) == 1


def test_a_byte_order_mark_is_no_part_of_the_heading(path):
    path.write_bytes(b"\xef\xbb\xbfid,lower,upper,size\r\na,0,1,2\r\n")
    assert [buffer.name for buffer in read_buffers(path)] == ["a"]


def test_digits_of_other_scripts_are_refused(path):
    path.write_text("id,lower,upper,size\na,0,1,٤\n")
    with pytest.raises(ValueError, match="line 2: size is '٤'; it must be a whole number"):
        read_buffers(path)
