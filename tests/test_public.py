"""What `import lsq` gives by name."""

import pytest

import lsq


@pytest.mark.parametrize(
    ("package", "name"), [("optim", "Adam"), ("dist", "GradientConfig"), ("huggingface", "save_clips")]
)
def test_packages_are_imported_when_they_are_used_first(package, name):
    """By `__getattr__`, which Python asks for what nobody has imported yet."""
    assert getattr(lsq.__getattr__(package), name).__module__.startswith(f"lsq.{package}.")
    assert package in dir(lsq)


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="'lsq' has no attribute 'nothing'"):
        _ = lsq.nothing
