"""What travels with the package: the embedded model's folder and the drawings it was trained on. Imports no torch."""

from pathlib import Path

SHAPES_VL = Path(__file__).parent / "shapes-vl"
