"""Greys of more than 8 bits: what their values mean, and the 8 bits that a model sees."""

from __future__ import annotations

import numpy as np
from PIL import Image

from forge_plugin_images.image_file import GreyRange

SCALED = ("PPM", "JPEG2000")
"""Formats whose greys of 9 to 16 bits Pillow scales to 16."""
READ = (*SCALED, "IM", "PNG", "SPIDER", "TIFF")
"""Formats whose deep greys Pillow reads right; it ignores the byte order of FITS, for example."""
DARK = 2**14
"""16-bit files whose values are all below this have fewer bits than they say, or an image that nobody could see."""
BITS, PHOTOMETRIC, SAMPLES = 258, 262, 339
"""Tags of TIFF: bits of a value, whether 0 is white, and unsigned (1), signed (2) or floating point (3)."""
AT_ONCE = 2**20
"""Pixels that are scaled at once, which bounds the memory it takes."""
HINT = "say which values are black and white: grey_range = [0, 4095] for 12 bits; or convert it to 8 bits"


def is_deep(image: Image.Image) -> bool:
    """Whether an image has greys of more than 8 bits."""
    return image.mode == "F" or image.mode.startswith("I")


def unknown_range(image: Image.Image) -> str:
    """Returns why the header of deep greys does not tell what their values mean; empty if it does.

    The values of 16 bits must be looked at, too: see `levels`.
    """
    if image.format not in READ:
        return f"Pillow does not read greys of {_name(image)} from {image.format} files; convert it to PNG or TIFF"
    known = image.mode.startswith("I;16") or (image.format in SCALED and image.mode == "I")
    return "" if known else f"its greys are {_name(image)}, and no header gives their range; {HINT}"


def levels(image: Image.Image, grey_range: GreyRange | None) -> np.ndarray:
    """Returns (height, width) uint8 of deep greys, 0 for black.

    Args:
        image: loaded, or not yet. Without `grey_range`, its header must define its values: see `unknown_range`.
        grey_range: the values that are black and white, between which levels are rounded; None: 16 bits lose the lower
            8, and TIFF files of fewer bits use the full range of their bits.

    Raises:
        ValueError: values are not finite; or 16 bits seem to have fewer.
    """
    white_is_zero = _tag(image, PHOTOMETRIC, 1) == 0
    bits, is_unsigned = _tag(image, BITS, 16), _tag(image, SAMPLES, 1) == 1
    assert grey_range is not None or not unknown_range(image), "the decoder checks each image that it opens"
    if grey_range is None and bits < 16:
        grey_range = 0.0, 2.0**bits - 1
    values = np.asarray(image)
    if is_unsigned and image.format == "TIFF" and values.dtype == np.int32:
        values = values.view(np.uint32)  # Pillow has no such mode
    # A maximum of 0 is a black image, which looks the same with any number of bits
    if grey_range is None and image.format not in SCALED and 0 < int(values.max()) < DARK:
        message = f"its greys have 16 bits, of which it uses {int(values.max()).bit_length()}"
        raise ValueError(f"{message}: it would be dark; {HINT}, or [0, 65535] if it is so dark")
    scaled = np.empty(values.shape, np.uint8)
    rows = max(1, AT_ONCE // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        scaled[start : start + rows] = _scaled(values[start : start + rows], grey_range)
    # PhotometricInterpretation 0 of TIFF is WhiteIsZero.
    return 255 - scaled if white_is_zero else scaled


def _scaled(values: np.ndarray, grey_range: GreyRange | None) -> np.ndarray:
    if grey_range is None:
        return (values >> 8).clip(0, 255)
    black, white = grey_range
    # float64: float32 has too few digits for integers of 32 bits
    shares = (values.astype(np.float64) - black) / (white - black)
    if not np.isfinite(shares).all():
        raise ValueError("its greys are not all finite; replace NaN and infinities")
    return (shares.clip(0, 1) * 255).round()


def _tag(image: Image.Image, tag: int, default: int) -> int:
    """Returns a tag of a TIFF with one channel; of another image its default."""
    value = getattr(image, "tag_v2", {}).get(tag, default) if image.format == "TIFF" else default
    return int(value[0] if isinstance(value, tuple) else value)


def _name(image: Image.Image) -> str:
    if image.mode == "F":
        return "floating point"
    return "16 bits" if image.mode.startswith("I;16") else "integers of more than 16 bits, or signed"
