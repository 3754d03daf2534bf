"""Memory of steps: on graphs small enough to count by hand, and of checkpoints."""

import torch

from lsq.commands.step_memory import saved_tensors, traced_peak


def test_each_storage_counts_once_and_parameters_do_not():
    weight = torch.nn.Parameter(torch.randn(3, 5))
    x = torch.randn(7, 5, requires_grad=True)

    def forward():
        y = (x * 2) @ weight.t()  # keeps x * 2 and the weight
        z = y.sigmoid()  # keeps z
        return (z * z.view(7, 3)).sum()  # keeps z twice, once as a view

    kept = saved_tensors(forward, [weight])
    assert kept == {"float32 [7, 5]": 7 * 5 * 4, "float32 [7, 3]": 7 * 3 * 4}
    assert kept.total() == 224
    # copies of parameters count, and of a view the whole storage
    x = torch.randn(7, 5, dtype=torch.bfloat16, requires_grad=True)
    kept = saved_tensors(lambda: torch.nn.functional.linear(x, weight.bfloat16()).sum(), [weight])
    assert kept["bfloat16 [3, 5]"] + kept["bfloat16 [5, 3]"] == 3 * 5 * 2
    assert kept["bfloat16 [7, 5]"] == 7 * 5 * 2
    base, factor = torch.randn(4, 8), torch.ones(4, requires_grad=True)
    kept = saved_tensors(lambda: (factor * base[:, 0]).sum(), [factor])
    assert kept == {"float32 [4]": 4 * 8 * 4}


def test_peak_is_of_what_is_held_at_a_time(capfd):
    def run():
        first = torch.empty(1000, dtype=torch.float64)
        del first
        second = torch.empty(500, dtype=torch.float64)
        return torch.empty(750, dtype=torch.float64), second

    assert traced_peak(run) == 8 * 1250
    assert capfd.readouterr().err == ""  # where the profiler writes what it does
