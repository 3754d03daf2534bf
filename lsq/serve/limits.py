"""What a service takes, and how long it waits."""

from dataclasses import dataclass, fields

from lsq.config import require_positive


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a service.

    Raises:
        ValueError: one is not above 0.
    """

    request_bytes: int = 2**20
    """Bytes of a request."""
    queue: int = 4096
    """Sentences that wait at the same time, of all requests."""
    beam: int = 16
    """The largest beam that a request may ask for."""
    connections: int = 2048
    """Clients at the same time."""
    receive_seconds: float = 10.0
    """For a request to arrive, its header and its body."""
    translate_seconds: float = 60.0
    """For a request to be answered once it has arrived."""
    shutdown_seconds: float = 30.0
    """For what has arrived to be answered when the service ends."""

    def __post_init__(self) -> None:
        for field in fields(self):
            require_positive(field.name, getattr(self, field.name))
