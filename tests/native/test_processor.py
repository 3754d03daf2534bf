"""Which CPU this is: what Linux says, and what to do where it says nothing."""

from lsq.native import processor


def test_cpu_model(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor : 0\nmodel name : Example CPU: 9000\nflags : avx2\n\nmodel name : Other\n"
    )
    assert processor.cpu_model(path) == "Example CPU: 9000"


def test_cpu_model_where_the_system_does_not_tell(tmp_path):
    path = tmp_path / "cpuinfo"
    assert processor.cpu_model(path)
    path.write_text("processor : 0\nFeatures : asimddp\n")
    assert processor.cpu_model(path)


def test_cpu_features():
    found = processor.cpu_features()
    assert isinstance(found, frozenset) and all(flag == flag.strip() and flag for flag in found)
