"""The reference: plain PyTorch, slow, and what the other backends are tested against."""

from collections.abc import Callable, Sequence

from lsq.program.backend import Backend, Call


class Reference(Backend):
    """Runs `Operation.reference`."""

    name = "reference"
    either_border = True

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        def run() -> None:
            for operation, _ in calls:
                operation.store(operation.reference())

        return run
