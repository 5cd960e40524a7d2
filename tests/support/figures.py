"""Texts and digests of figures."""

import hashlib
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.text import Text


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def written(figure: Figure) -> list[str]:
    """All non-empty texts of a figure."""
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
