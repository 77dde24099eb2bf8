"""Fonts by name: Pillow's own, a file, or one that matplotlib has."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

from forge_core.contracts.errors import JobError
from forge_plugin_images.rendered_text import BUILT_IN

Font = ImageFont.FreeTypeFont


@lru_cache(maxsize=256)
def load_font(name: str, size: int) -> Font:
    """Returns a font of this size in pixels.

    Raises:
        JobError: there is none of this name.
    """
    if name == BUILT_IN:
        font = ImageFont.load_default(size)
        if not isinstance(font, Font):  # Pillow without FreeType has a bitmap of one size
            raise JobError(f"{name!r}: this Pillow has no FreeType; install Pillow from its wheel")
        return font
    try:
        # The basic layout, as Pillow may or may not have another one, with other distances between letters.
        return ImageFont.truetype(str(_path(name)), size, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise JobError(f"{name!r} is no font that FreeType can read ({error})") from error


@lru_cache(maxsize=1 << 16)
def letter_width(name: str, size: int, letter: str) -> float:
    """Returns the pixels from the start of a letter to the start of the next one."""
    return load_font(name, size).getlength(letter)


def _path(name: str) -> Path:
    if (path := Path(name)).is_file():
        return path
    try:
        import matplotlib
    except ImportError as error:
        hint = f"give a .ttf file or {BUILT_IN!r}, or install matplotlib, which has fonts: pip install matplotlib"
        raise JobError(f"{name!r} is no file; {hint}") from error
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    path = folder / f"{name}.ttf"
    if not path.is_file():
        known = ", ".join(sorted(font.stem for font in folder.glob("DejaVu*.ttf")))
        raise JobError(
            f"{name!r} is neither a file nor a font of matplotlib; give {BUILT_IN!r}, a file or one of {known}"
        )
    return path
