"""Makes the modules of benchmarks/ importable, as they are for the scripts beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
