"""Benchmarks are scripts that import each other by name; so does who imports them as a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
