"""Lets the live comparison import the reference side, which lives beside the golden scripts."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)
