import pytest

from lsq.fairseq import compatibility


def test_replaced_puts_everything_back():
    class Module:
        one, two = 1, 2

    with pytest.raises(KeyError), compatibility.replaced(Module, one=10, two=20):
        assert (Module.one, Module.two) == (10, 20)
        raise KeyError
    assert (Module.one, Module.two) == (1, 2)
