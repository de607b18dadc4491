"""The data of the package: embedded models' folders, and what the doctor asks them. Imports no torch."""

from pathlib import Path

_HERE = Path(__file__).parent
SHAPES_VL = _HERE / "shapes-vl"
DOCTOR = _HERE / "doctor"
"""questions.json, and the images that it names."""

EMBEDDED = {path.parent.name: path.parent for path in sorted(_HERE.glob("*/config.json"))}
"""Folders by the names under which they can be asked for."""
