"""Claims of speed and memory as rows of one table, `python -m benchmarks`; scripts of studies."""

import sys
from pathlib import Path

# Scripts import their neighbours by bare name, as `python benchmarks/NAME.py` finds them.
sys.path.append(str(Path(__file__).parent))
