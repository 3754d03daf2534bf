"""What `import lsq` gives by name, and what it leaves for later."""

import subprocess
import sys

CODE = """
import sys
import lsq

assert "torch" not in sys.modules, "import lsq loads PyTorch"
assert lsq.optim.Adam.__module__ == "lsq.optim.adam"
assert lsq.dist.GradientConfig(mode="int8").block == 128
assert callable(lsq.huggingface.save_clips)
assert "transformers" not in sys.modules
assert {"convert", "dist", "huggingface", "optim"} <= set(dir(lsq))
try:
    lsq.nothing
except AttributeError as error:
    assert "'lsq' has no attribute 'nothing'" in str(error)
else:
    raise AssertionError("lsq.nothing is there")
"""


def test_names_are_imported_when_they_are_used_first():
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
