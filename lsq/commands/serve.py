"""`lsq serve`: translations over HTTP."""

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import fields

from lsq.commands import logs
from lsq.commands.options import command_parser
from lsq.commands.translator import ModelOptions, add_search, search_options, translator_of
from lsq.config import documentation, require_positive
from lsq.serving.http.requests import Limits

MOST_PORT = 2**16 - 1


class Options(ModelOptions):
    """Serve translations over HTTP: POST /translate takes {"text": ["one line", "another"]} and
    options of the search such as "beam"; GET /health and /metrics (for Prometheus) report its
    state, and GET / is a page for trying it. Requests that arrive together are translated together.
    Ctrl-C or SIGTERM ends it once all requests that have arrived are answered."""

    host: str = "127.0.0.1"
    """address to serve at; 0.0.0.0: all addresses of this machine"""
    port: int = 8080
    """port to serve at; 0: any free port"""


def parser() -> ArgumentParser:
    made = command_parser("serve", Options)
    limits, texts = made.add_argument_group("limits"), documentation(Limits)
    for field in fields(Limits):
        given = {"type": field.type, "default": field.default}
        text = texts[field.name].replace("%", "%%")
        limits.add_argument(option_of(field.name), help=text, **given)
    add_search(made)
    return made


def option_of(limit: str) -> str:
    return "--limit-" + limit.replace("_", "-")


def limits_of(given: Namespace) -> Limits:
    values = {field.name: getattr(given, f"limit_{field.name}") for field in fields(Limits)}
    for name, value in values.items():
        require_positive(option_of(name), value)
    return Limits(**values)


def run(arguments: list[str]) -> int:
    """Serve until a signal comes; OSError if the address is in use."""
    given = parser().parse_args(arguments)
    if not 0 <= given.port <= MOST_PORT:
        raise ValueError(f"--port is {given.port}; it must be from 0 to {MOST_PORT}")
    limits = limits_of(given)
    # imported here: --help works without the extra's packages
    from lsq.serving.http.server import listen, server_of
    from lsq.serving.http.service import Service

    logs.to_standard_error()
    logs.quieten()
    with listen(given.host, given.port) as address:
        translator = translator_of(given)
        service = Service(translator, search_options(given, translator.options), limits)
        host, port, *_ = address.getsockname()
        shown = f"[{host}]" if ":" in host else host
        message = f"serving {translator.model.file} at http://{shown}:{port}"
        print(message, file=sys.stderr, flush=True)
        asyncio.run(server_of(service.application()).serve(sockets=[address]))
    return 0
