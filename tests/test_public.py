"""What `import lsq` gives by name."""

import pytest
from torch import nn

import lsq
from lsq import dist, models
from lsq.layers.memory import release_memory
from lsq.models import sparsity
from lsq.observe import quantized_tensors
from lsq.study import measure, sensitivity


@pytest.mark.parametrize(
    ("package", "name"), [("optim", "Adam"), ("dist", "GradientConfig"), ("models", "convert")]
)
def test_packages_are_imported_when_they_are_used_first(package, name):
    """By `__getattr__`, which Python asks for what nobody has imported yet."""
    assert getattr(lsq.__getattr__(package), name).__module__.startswith(f"lsq.{package}.")
    assert package in dir(lsq)


class Trainer:
    """Like that of transformers, it has its model in it."""

    def __init__(self):
        self.model = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "function",
    [
        lsq.convert,
        lsq.revert,
        lsq.monitor,
        lambda model: lsq.plan_memory(model, None),
        release_memory,
        models.float_state_dict,
        lambda model: models.save_clips(model, "nowhere"),
        lambda model: models.set_node_bits(model, None),
        sparsity.sparsify,
        sparsity.sparsity_of,
        dist.compress_gradients,
        lambda model: list(quantized_tensors(model)),
        lambda model: sensitivity(model, None, [1]),
        lambda model: measure(model, None),
    ],
)
def test_what_is_no_model_is_refused(function):
    with pytest.raises(
        TypeError,
        match=r"^model is 'gpt2', a str; give a torch.nn.Module, such as what from_pretrai",
    ):
        function("gpt2")
    with pytest.raises(
        TypeError,
        match=r"^model is a Trainer; give the model in it, its .model, before the Trainer",
    ):
        function(Trainer())


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="'lsq' has no attribute 'nothing'"):
        _ = lsq.nothing
