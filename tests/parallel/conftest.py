"""The model's test helpers, for the tests that run it in parallel."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "nn"))
