"""What a service takes, and how long it waits."""

from dataclasses import dataclass, fields

from lsq.config import require_positive
from lsq.serving.decode import SearchOptions


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a service.

    Raises:
        ValueError: one is not above 0.
    """

    request_bytes: int = 2**20
    """Bytes of a request."""
    held_bytes: int = 2**28
    """Bytes of all requests that have arrived, whole or in part, and are not answered."""
    queue: int = 4096
    """Sentences that wait at the same time, of all requests."""
    beam: int = 16
    """The largest beam that a request may ask for."""
    words: int = 512
    """The longest translation that a request may ask for, in subwords."""
    connections: int = 2048
    """Clients at the same time."""
    receive_seconds: float = 10.0
    """For a request to arrive, its header and its body."""
    translate_seconds: float = 60.0
    """For a request to be answered once it has arrived."""
    read_seconds: float = 30.0
    """For a client to read its answer."""
    shutdown_seconds: float = 30.0
    """For what has arrived to be answered when the service ends."""

    def __post_init__(self) -> None:
        for field in fields(self):
            require_positive(field.name, getattr(self, field.name))

    def check(self, options: SearchOptions, longest_source: int) -> None:
        """Refuse options that allow more than a service takes.

        Args:
            longest_source: words of a source, at most.

        Raises:
            ValueError: that.
        """
        if options.beam > self.beam:
            raise ValueError(f"beam is {options.beam}; this service takes {self.beam} at most")
        most = self.words - options.max_len_a * longest_source
        if options.max_len_b > most:
            raise ValueError(
                f"max_len_a * {longest_source} + max_len_b allows longer translations than this"
                " service's longest,"
                f" {self.words} words; with this max_len_a of {options.max_len_a:g}, max_len_b may"
                f" be {max(most, 0):g}"
            )
