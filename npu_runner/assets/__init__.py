"""What travels with the package: embedded models' folders and the drawings they were trained on. Imports no torch."""

from pathlib import Path

SHAPES_VL = Path(__file__).parent / "shapes-vl"

EMBEDDED = {path.parent.name: path.parent for path in sorted(Path(__file__).parent.glob("*/config.json"))}
"""Folders by the names under which they can be asked for."""
