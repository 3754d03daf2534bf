import logging
import os
import subprocess
import sys
import warnings

import pytest

from lsq.commands.logs import NOISE, logging_to, quieten


def test_logging_to_a_file_and_back(tmp_path, capsys):
    root = logging.getLogger()
    before = (root.handlers, root.level)
    with pytest.raises(KeyError), logging_to(tmp_path / "log"):
        logging.getLogger("somewhere").info("an update")
        warnings.simplefilter("always")
        warnings.warn("look out", stacklevel=1)
        raise KeyError
    assert (root.handlers, root.level) == before
    text = (tmp_path / "log").read_text()
    assert "INFO | somewhere | an update" in text and "look out" in text
    assert "an update" not in capsys.readouterr().out


def test_a_log_that_nobody_reads_ends_the_command():
    code = "import logging; from lsq.commands import logs; logs.configure()"
    code += "; logging.warning('x'); print('too late')"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode and b"BrokenPipeError" in done.stderr
    assert b"Logging error" not in done.stderr


def test_only_the_noise_is_ignored():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quieten()
        noise = "'pin_memory' argument is set as true but no accelerator is found"
        warnings.warn(noise, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something else"]
    assert len(set(NOISE)) == len(NOISE)


@pytest.mark.thorough
def test_imports_of_the_plugin_print_nothing():
    code = "from lsq.commands import logs; logs.configure(); import lsq.commands.train"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
