"""The command that installs an extra of lsq's, as messages print it."""

import json
import shlex
from importlib import metadata
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "lsq-int8"
"""The name under which lsq is installed. It is not published; `lsq` on PyPI is somebody else's."""


def command(extra: str) -> str:
    """The line that adds `extra` to what was installed: a checkout, one that is editable, or a wheel.

    Without a record of that it names the current folder, which is to be the checkout then.
    """
    origin = _origin()
    editable = origin.get("dir_info", {}).get("editable", False)
    path = url2pathname(urlsplit(origin["url"]).path) if origin else "."
    options = "--no-build-isolation --editable " if editable else ""
    return f"pip install {options}{shlex.quote(f'{path}[{extra}]')}"


def _origin() -> dict:
    """What pip has written down of where lsq came from (PEP 610); empty where it has not.

    A checkout that is on the path has metadata of its own, without a record.
    """
    records = (found.read_text("direct_url.json") for found in metadata.distributions(name=DISTRIBUTION))
    return json.loads(next(filter(None, records), "{}"))
