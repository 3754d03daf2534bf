"""Log of fairseq and lsq: on the screen or in a file, without known noise."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
STANDARD_ERROR = 2
NOISE = (
    "'pin_memory' argument is set as true",
    "Support for mismatched key_padding_mask",
    r"`torch\.cuda\.amp",
    "`broadcast_buffers` is deprecated",
    r"hydra\.experimental",
    r"\s*The version_base parameter",
    r"\s*The strict flag in the compose API",
    "In 'config': Usage of deprecated keyword",
    r"\s*'config' is validated against ConfigStore",
)


class _Screen(logging.StreamHandler):
    """Handler that ends the command when nobody reads its output any more, as a print would."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), BrokenPipeError):
            raise
        super().handleError(record)


def configure() -> None:
    """Log warnings to standard output, as fairseq does; call it before fairseq is imported."""
    logging.basicConfig(
        format=FORMAT,
        datefmt="%Y-%m-%d %H:%M:%S",
        level=logging.WARNING,
        handlers=[_Screen(sys.stdout)],
    )
    # its only message: it caches the fonts
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def to_standard_error() -> None:
    """Log to standard error, for commands that write results to standard output."""
    for handler in logging.getLogger().handlers:
        if getattr(handler, "stream", None) is sys.stdout:
            handler.setStream(sys.stderr)


def quieten() -> None:
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)


@contextlib.contextmanager
def silent_libraries() -> Iterator[None]:
    """Discard standard error within this context, also of C++: PyTorch's profiler logs there."""
    kept = os.dup(STANDARD_ERROR)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), STANDARD_ERROR)
        yield
    finally:
        os.dup2(kept, STANDARD_ERROR)
        os.close(kept)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write log and warnings into a file instead of the screen within this context."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(FORMAT))
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers = handlers
        root.setLevel(level)
        handler.close()
