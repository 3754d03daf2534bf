"""Which products are tuned: ladders of tokens, and lists from files."""

import json

import pytest

from lsq.gemm.product_key import ProductKey
from lsq.tune import coverage, shapes
from lsq.tune.coverage import Coverage, Line

FULL = ProductKey(op="matmul", m=8, n=16, k=24, dtype="bfloat16", out="float32", layout="tn")


def test_token_counts():
    assert shapes.token_counts(4096, 1024) == [4096, 3072, 2048, 1024]
    assert shapes.token_counts(100, 32) == [100, 96, 64, 32]
    assert shapes.token_counts(20, 32) == [20]
    with pytest.raises(ValueError, match="step is 100; .*multiple"):
        shapes.token_counts(4096, 100)


def test_generation_rows():
    assert shapes.generation_rows(5, 12) == [60, 40, 20, 10, 5]
    assert shapes.generation_rows(4, 400)[:3] == [1600, 512, 256]
    assert shapes.generation_rows(1, 1) == [1]


def test_keys_from_csv(tmp_path):
    file = tmp_path / "shapes.csv"
    file.write_text(
        "op,m,n,k,dtype,out,alpha,layout\nlinear_int8, 64,128,256,,,,\nlinear_weight_gradient,64,128,200,,,,nt\n"
        "matmul,8,16,24,bfloat16,float32,,tn\n"
    )
    assert shapes.read_keys(file) == [
        ProductKey.of("linear_int8", 64, 128, 256), ProductKey.of("linear_weight_gradient", 64, 128, 200, "nt"), FULL
    ]


def test_keys_from_json(tmp_path):
    file = tmp_path / "shapes.json"
    numbers = {"m": 64, "n": 128, "k": 256}
    fields = {"m": 8, "n": 16, "k": 24, "dtype": "bfloat16", "out": "float32", "layout": "tn"}
    file.write_text(json.dumps([{"op": "linear_int8", **numbers}, {"op": "matmul", **fields}]))
    assert shapes.read_keys(file) == [ProductKey.of("linear_int8", **numbers), FULL]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "op,m,n\n", r"a\.csv: line 1: no column k; the heading is op,m,n,k,dtype"),
        ("a.csv", "", "no column op, m, n, k"),
        ("a.csv", "op,m,n,k\nlinear_int8,1,16\n", "line 2: .*different numbers of columns"),
        ("a.csv", "op,m,n,k\nlinear_int8,1,16,16,5\n", "line 2: .*different numbers of columns"),
        ("a.csv", "op,m,n,k\nlinear_int8,x,16,16\n", "line 2: m is 'x'"),
        ("a.csv", "op,m,n,k\nlinear_int8,0,16,16\n", "line 2: m is 0"),
        ("a.csv", "op,m,n,k\nlinear_int8," + "9" * 50 + ",16,16\n", "line 2: m is '999"),
        ("a.csv", "op,m,n,k\n,1,16,16\n", "line 2: .*no field 'op'"),
        ("a.csv", "op,m,n,k,colour\nlinear_int8,1,16,16,red\n", "line 2: .*unknown field 'colour'"),
        ("a.json", "{}", "the list is a dict"),
        ("a.json", "[1]", r"the list\[0\] is 1; it must be an object with op, m"),
        ("a.json", '[{"op": "linear_int8", "m": 1, "n": 16}]', r"the list\[0\] has no field 'k'"),
        ("a.json", '[{"op": "none", "m": 1, "n": 16, "k": 16}]', r"the list\[0\].op is 'none'; allowed"),
        ("a.json", '[{"op": "matmul", "m": 1, "n": 16, "k": 16, "dtype": []}]', r"the list\[0\].dtype is a list"),
        ("a.json", '[{"op": [], "m": 1, "n": 16, "k": 16}]', r"the list\[0\].op is a list"),
        ("a.json", "[", "this is not JSON"),
    ],
)
def test_mistakes_in_files_are_named(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        shapes.read_keys(file)


def test_missed_products_of_a_run(tmp_path):
    keys = [ProductKey.of("linear_int8", m, 128, 256) for m in (32, 64, 96)]
    lines = tuple(
        Line(key=key, calls=5, seconds=number, served=key if number == 1 else None) for number, key in enumerate(keys)
    )
    report = Coverage(kind="cpu", device="Example CPU", files=(), lines=lines)
    coverage.write(tmp_path / "report.json", report)
    assert shapes.read_missed(tmp_path / "report.json") == ("cpu", [keys[2], keys[0]])


def test_products_of_a_gpu():
    key = ProductKey.of("linear_weight_gradient", 64, 128, 41)
    assert shapes.for_device(key, "cpu") == key
    assert shapes.for_device(key, "cuda") == ProductKey.of("linear_weight_gradient", 64, 128, 48, "nt")
    assert shapes.for_device(FULL, "cuda") == FULL


def test_a_list_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "shapes.csv"
    file.write_bytes(b"\xef\xbb\xbfop,m,n,k\r\nlinear_int8,20,48,64\r\n")
    assert shapes.read_keys(file) == [ProductKey.of("linear_int8", 20, 48, 64)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.csv", "op,m,n,k\nlinear_int8,٦٤,48,64\n".encode(), "line 2: m is .*; it must be a whole number"),
        ("s.csv", b"op,m,n,k\nlinear_int8,6_4,48,64\n", "line 2: m is '6_4'; it must be a whole number"),
        ("s.csv", b"op,m,n,k\n", "s.csv has no products; give one line op,m,n,k for each"),
        ("s.json", b"[]", "s.json has no products"),
        ("s.csv", b"\xff\xfe\0", "this is not a CSV file"),
        ("s.csv", b"x" * 200_000, "this is not a CSV file .field larger"),
    ],
)
def test_lists_that_are_none(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        shapes.read_keys(tmp_path / name)
