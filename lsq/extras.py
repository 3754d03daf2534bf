"""The command that installs an extra of lsq's, as messages print it."""

import json
import shlex
from importlib import metadata
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "lsq-int8"
"""The name under which lsq is installed. It is not published; `lsq` on PyPI is somebody else's."""
OF_MODULES = {
    **dict.fromkeys(("fairseq", "fairseq_cli", "omegaconf", "hydra"), "fairseq"),
    **dict.fromkeys(("transformers", "accelerate"), "huggingface"),
    **dict.fromkeys(("uvicorn", "starlette", "prometheus_client"), "serve"),
    "ctranslate2": "ctranslate2",
    **dict.fromkeys(("cuda", "nvidia"), "cuda13"),
}
"""Modules -> the extra of lsq (pyproject.toml) that installs them; others are packages of the same
name."""


def command(extra: str) -> str:
    """The line that adds `extra` to what was installed: a checkout, one that is editable, or a
    wheel.

    Without a record of that it names the current folder, which is to be the checkout then.
    """
    origin = _origin()
    editable = origin.get("dir_info", {}).get("editable", False)
    path = url2pathname(urlsplit(origin["url"]).path) if origin else "."
    options = "--no-build-isolation --editable " if editable else ""
    return f"pip install {options}{shlex.quote(f'{path}[{extra}]')}"


def missing(module: str) -> str:
    """Say which package `module` is of, that it is not installed, and what installs it."""
    extra = OF_MODULES.get(module)
    needed = "fairseq" if extra == "fairseq" else module
    remedy = command(extra) if extra else f"pip install {module}"
    return f"{needed}, which is not installed: {remedy}"


def _origin() -> dict:
    """What pip has written down of where lsq came from (PEP 610); empty where it has not.

    A checkout that is on the path has metadata of its own, without a record.
    """
    records = (
        found.read_text("direct_url.json") for found in metadata.distributions(name=DISTRIBUTION)
    )
    return json.loads(next(filter(None, records), "{}"))
