import json
import random
from dataclasses import asdict, replace

import pytest
from matplotlib.figure import Figure

from lsq.memory.buffers import Buffer
from lsq.memory.files import alive_at_peak, draw, read_buffers, save_plan, write_plan
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
    path.write_bytes(b"\xef\xbb\xbfsize,id,alignment,upper,lower\r\n10,a,,3,0\r\n")
    assert read_buffers(path) == buffers_of((10, 0, 2))


def test_offsets_and_other_names_of_minimalloc(path):
    path.write_text("buffer_id,start,end,size,offset,gaps\na,0,2,10,,\nb,3,3,4,8,\n")
    a, b = buffers_of((10, 0, 2), (4, 3, 3))
    assert read_buffers(path) == [a, replace(b, offset=8)]
    assert plan(read_buffers(path)).offsets == {"a": 0, "b": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give a heading, id,lower,upper,size, and a row for each buffer"),
        ("\n", "line 1: no column id, lower, upper, size"),
        ("id,lower,size\n", "line 1: no column upper in 'id,lower,size'"),
        (
            "id,lower,upper,size,hint\na,0,1,2,3\n",
            "line 1: unknown column hint in 'id,lower,upper,size,",
        ),
        (
            "id,lower,upper,size,end\na,0,1,2,3\n",
            "line 1: twice the column upper in 'id,lower,upper,",
        ),
        (
            "id,lower,upper,size,gaps\na,0,9,2,3-5 6-7@0:1\n",
            "line 2: buffer 'a' has gaps, '3-5 6-7@0:1'",
        ),
        (
            "id,lower,upper,size,offset\na,0,9,2,x\n",
            "line 2: offset is 'x'; it must be a whole number",
        ),
        (
            "id,lower,upper,size,offset\na,0,9,2,-1\n",
            "line 2: buffer 'a': offset is -1; it must be",
        ),
        (
            "id,lower,upper,size,offset,alignment\na,0,9,2,4,8\n",
            "line 2: buffer 'a': offset is 4; it must",
        ),
        ("id,lower,upper,size\n", "has no buffers"),
        ("id,lower,upper,size\na,0,1,2\nb,0,1\n", "line 3: the row has not as many values"),
        ("id,lower,upper,size\na,0,1,2,3\n", "line 2: the row has not as many values"),
        ("id,lower,upper,size\na,0,1,two\n", "line 2: size is 'two'"),
        ("id,lower,upper,size\na,0,1,1_0\n", "line 2: size is '1_0'; it must be a whole number"),
        ("id,lower,upper,size\na,0,1, 2\n", "line 2: size is ' 2'"),
        ("id,lower,upper,size\na,0,1,\xb2\n", "is not a CSV file"),
        ("id,lower,upper,size\na,0,1,\xd9\xa4\n", "line 2: size is '٤'; it must be a whole"),
        (
            "id,lower,upper,size\na,0,1," + "9" * 5000 + "\n",
            "line 2: size is 9{100}; it must be at most 2",
        ),
        ("id,lower,upper,size\na,0,1,-2\n", "line 2: buffer 'a': size is -2"),
        (
            "id,lower,upper,size\na,0,1,4611686018427387905\n",
            "line 2: size is 4611686018427387905; it must be at most",
        ),
        (
            "id,lower,upper,size\na,3,3,2\n",
            "line 2: upper is 3; it must be above lower, which is 3",
        ),
        (
            "id,lower,upper,size\na,0,1,2\nb,0,1,2\na,0,1,2\n",
            "line 4: id 'a' stands in line 2 already",
        ),
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
    assert path.read_text() == "id,offset\na,0\nb,4\n"


def test_a_plan_as_json_says_all(path):
    for options in ({}, {"capacity": 10**6}):
        made = plan(random_buffers(random.Random(2), 20), **options)
        save_plan(made, path)
        assert json.loads(path.read_text()) == json.loads(json.dumps(asdict(made)))


def test_a_failed_write_leaves_the_file_as_it_was(path, monkeypatch):
    path.write_text("before")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("lsq.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_plan(plan(buffers_of((4, 0, 1))), path)
    assert path.read_text() == "before" and len(list(path.parent.iterdir())) == 1


def test_alive_at_peak():
    buffers = buffers_of((4, 0, 3), (9, 3, 5), (7, 4, 6), (0, 3, 9), (5, 5, 5))
    time, alive = alive_at_peak(buffers)
    assert time == 5 and [buffer.name for buffer in alive] == ["b", "c", "e"]
    assert sum(buffer.size for buffer in alive) == 21
    assert alive_at_peak([]) == (None, [])


def test_draw(tmp_path):
    buffers = random_buffers(random.Random(1), 100)
    for name, start in (("map.png", b"\x89PNG"), ("map.svg", b"<?xml")):
        draw(buffers, plan(buffers), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_picture_depends_on_the_plan(tmp_path):
    buffers = buffers_of((4, 0, 3), (6, 3, 5))
    made = plan(buffers)
    draw(buffers, made, tmp_path / "one.png")
    assert made.offsets == {"a": 6, "b": 0}
    draw(buffers, replace(made, offsets={"a": 0, "b": 4}), tmp_path / "other.png")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "other.png").read_bytes()


def test_there_must_be_something_to_draw(tmp_path):
    buffers = buffers_of((0, 0, 3))
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(buffers, plan(buffers), tmp_path / "map.png")


def test_the_picture_says_what_it_shows(tmp_path):
    buffers = buffers_of((4, 0, 3), (9, 3, 5))
    draw(buffers, plan(buffers), tmp_path / "map.svg")
    title = "2 buffers over 6 operations, portfolio: 0.000% above the lower bound"
    assert f"<!-- {title} -->" in (tmp_path / "map.svg").read_text()


def test_the_lower_bound_is_seen_under_the_peak(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    buffers = buffers_of((4, 0, 3), (9, 3, 5))
    draw(buffers, plan(buffers), tmp_path / "map.png")
    bound, peak = drawn[0].axes[0].lines
    assert (bound.get_label(), peak.get_label()) == ("lower bound", "peak of the plan")
    assert (
        bound.get_ydata() == peak.get_ydata() and bound.get_linewidth() > 3 * peak.get_linewidth()
    )
