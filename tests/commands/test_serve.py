import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from lsq.commands import serve
from lsq.commands.translator import search_options
from lsq.serving import SearchOptions, model_file
from lsq.serving.http.requests import Limits
from tests.sampling import first
from tests.serving.test_model_file import exported


def test_every_limit_is_an_option(lsq):
    shown = lsq("serve", "--help")[1]
    for name in ("queue", "beam", "words"):
        assert f"--limit-{name}" in shown


def test_limits_are_no_options_of_the_search():
    given = serve.parser().parse_args(["--model", "m", "--limit-beam", "7", "--nbest", "2"])
    assert serve.limits_of(given) == Limits(beam=7)
    defaults = SearchOptions(beam=3, max_len_b=40)
    assert search_options(given, defaults) == SearchOptions(beam=3, nbest=2, max_len_b=40)


def test_mistakes(refused):
    given = ("serve", "--model", "missing")
    refused("--port is 65536; it must be from 0 to 65535", *given, "--port", "65536")
    refused("--limit-queue is 0; it must be", *given, "--limit-queue", "0")
    refused("missing is not there", *given, "--port", "0")


@pytest.mark.thorough
def test_an_exported_model_is_served_without_what_takes_long_to_import(tmp_path):
    """fairseq, the compiler of PyTorch, and what those bring along."""
    path = tmp_path / "model.safetensors"
    model_file.write(path, replace(exported(), subwords=None))
    code = f"""
import sys
from lsq.commands import serve, translate
from lsq.serving.http import service as application, server
from lsq.serving.http.requests import Limits
translator = translate.translator_of(serve.parser().parse_args(["--model", {str(path)!r}]))
service = application.Service(translator, translator.options, Limits())
server.server_of(service.application())
assert translator.translate(["encoder5\u2581 encoder6\u2581"])[0][0].text
late = ("fairseq", "omegaconf", "matplotlib", "scipy", "sympy", "numpy.f2py")
late += ("torch._dynamo", "torch._inductor")
found = [name for name in sys.modules if name.startswith(late)]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("number", first([signal.SIGTERM, signal.SIGINT], 0, 1))
def test_a_service_from_beginning_to_end(output, translator, number):
    command = f"{sys.executable} -m lsq.commands.cli serve --model {output} --port 0 --beam 2"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(command.split(), env=environment, stderr=subprocess.PIPE, text=True)
    said = process.stderr.readline()
    serving = r"serving .*/int8/model/checkpoint_best.pt at (http://127.0.0.1:\d+)\n"
    address = re.fullmatch(serving, said)[1]
    request = json.dumps({"text": ["red cat", ""]}).encode()
    with urllib.request.urlopen(f"{address}/translate", request) as answer:
        found = json.load(answer)["translations"]
    expected = translator.translate(["red cat", ""], SearchOptions(beam=2, max_len_b=40))
    assert [each["text"] for each in found] == [translations[0].text for translations in expected]
    process.send_signal(number)
    assert process.communicate(timeout=30)[1] == "" and process.returncode == 0
