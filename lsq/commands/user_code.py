"""The option --import: a user's Python file or module, which declares number formats."""

import importlib
import importlib.util
import sys
import traceback
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Annotated

PACKAGE = str(Path(__file__).parents[1])


def load(source: str) -> str:
    """Run a Python file, or import a module, which may lie in the current folder; once a process.

    Raises:
        FileNotFoundError: there is no such file.
        ArgumentTypeError: there is no such module, or the code raises an error.
    """
    path = Path(source)
    is_file = path.suffix == ".py" or len(path.parts) > 1
    if is_file and not path.is_file():
        raise FileNotFoundError(2, "is not there", source)
    name = f"user_code:{path.resolve()}" if is_file else source
    if name in sys.modules:
        return source
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as for `python FILE` and `python -m MODULE`
    try:
        if is_file:
            spec = importlib.util.spec_from_file_location(name, path)
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        else:
            importlib.import_module(source)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        lines = [
            f" ({frame.filename}, line {frame.lineno})"
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((PACKAGE, "<frozen"))
        ]
        raise ArgumentTypeError(
            f"{source} cannot be imported: {type(error).__name__}: {error}{(lines or [''])[-1]}"
        ) from error
    finally:
        sys.path.remove(folder)
    return source


class UserCode(Namespace):
    """number formats of your own"""

    import_: Annotated[str, "FILE_OR_MODULE", load] | None = None
    """Python that declares them by @lsq.number_format"""
