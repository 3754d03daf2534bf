"""Lists of products: written and read as the same, and mistakes in them named."""

import pytest

from lsq.gemm.tuner import product_list
from tests.gemm.operands import asked, matmul

FULL = matmul(m=8, n=16, dtype="bfloat16", out="float32", layout="tn", leading_a=16)


def test_lists_of_products(tmp_path):
    listed = tmp_path / "shapes.csv"
    listed.write_bytes(
        b"\xef\xbb\xbfop,m,n,k,dtype,out,layout,leading_a\r\nproject, 64,128,256,,,,\r\n"
        b",8,16,64,bfloat16,float32,tn,16\r\n"
    )
    keys = product_list.read(listed)
    assert keys == [asked("project", 64, 128, 256), FULL]
    listed.write_text(product_list.text(keys))
    assert product_list.read(listed) == keys


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "op,m,n\n",
            r"shapes\.csv: line 1: no column k; the heading is op,m,n,k,dtype.*\(correct the"
            r" file\)$",
        ),
        ("", "line 1: the file is empty; its heading must be op,m,n,k,dtype"),
        (
            "op,m,n,k\nproject,1,16\n",
            "line 2: the heading and this line have different numbers of columns",
        ),
        ("op,m,n,k\nproject,1,16,16,5\n", "line 2: .*different numbers of columns"),
        ("op,m,n,k\nproject,x,16,16\n", "line 2: m is 'x'"),
        ("op,m,n,k\nproject,0,16,16\n", "line 2: m is 0"),
        ("op,m,n,k\nproject," + "9" * 50 + ",16,16\n", "line 2: m is '999"),
        ("op,m,n,k\nproject,٦٤,48,64\n", "line 2: m is .*; it must be a whole number"),
        ("op,m,n,k\nproject,6_4,48,64\n", "line 2: m is '6_4'; it must be a whole number"),
        ("op,m,n,k\nconv,1,16,16\n", "line 2: op is 'conv'; allowed"),
        (
            "op,m,n,k,layout\nproject,1,16,16,nn\n",
            "line 2: layout is 'nn'; project says that itself",
        ),
        ("op,m,n,k,colour\nproject,1,16,16,red\n", "line 2: .*unknown field 'colour'"),
        ("op,m,n,k\nproject,1,,16\n", "line 2: .*no field 'n'"),
        (b"\xff\xfe\0", "line 1: .*can't decode"),
        ("x" * 200_000, "line 1: field larger"),
    ],
)
def test_mistakes_in_lists_are_named(tmp_path, content, message):
    listed = tmp_path / "shapes.csv"
    listed.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        product_list.read(listed)
