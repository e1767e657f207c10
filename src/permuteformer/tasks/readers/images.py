"""Image files as arrays of gray values."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from permuteformer.tasks.readers.errors import reason

MAX_PIXELS = 64 << 20
"""A small file may contain an image of any size."""

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "DIB", "PPM", "TIFF", "WEBP", "TGA", "PCX", "ICO", "SGI", "JPEG2000", "AVIF", "QOI", "XBM")
"""Formats that Pillow reads itself. For others, such as EPS, it would start another program."""


def gray_image(data: bytes, size: tuple[int, int] | None = None) -> NDArray[numpy.uint8]:
    """Return the gray values of an image file, uint8 (height, width).

    Colors are converted by ``gray_of_rgb``, transparent pixels are blended with white, and 16-bit values are scaled so that 65,535 becomes
    255. Only the first of several frames is read. The rotation noted by a camera (EXIF) is ignored.

    Args:
        data: the file, in one of ``FORMATS``.
        size: height and width of the result, whose pixels are means over areas of the image. Default: the size of the image.

    Raises:
        ValueError: the file is empty, damaged or not an image, or has more than ``MAX_PIXELS``.

    >>> file = io.BytesIO()
    >>> Image.new("RGB", (3, 2), "red").save(file, "PNG")
    >>> gray_image(file.getvalue()).tolist()
    [[76, 76, 76], [76, 76, 76]]
    """
    if size is not None and (min(size) < 1 or size[0] * size[1] > MAX_PIXELS):
        raise ValueError(f"size must be a height and width of at least 1 and at most {MAX_PIXELS:,} pixels; got {size}")
    if not data:
        raise ValueError("the image file is empty; download or copy it again")
    values = _gray_values(_load(data))
    if size is None or size == values.shape:
        return values
    return numpy.array(Image.fromarray(values).resize((size[1], size[0]), Image.Resampling.BOX))


def gray_of_rgb(rgb: NDArray[numpy.uint8]) -> NDArray[numpy.uint8]:
    """Return the gray values of colors (…, 3): 0.299 R + 0.587 G + 0.114 B (ITU-R 601), rounded half up.

    Integer arithmetic makes it exact. Pillow's ``convert("L")`` has 16-bit weights and differs by one for 9,040 of the 16,777,216 colors.

    >>> gray_of_rgb(numpy.array([[255, 0, 0], [255, 255, 255]], dtype=numpy.uint8)).tolist()
    [76, 255]
    """
    total = rgb[..., 0] * numpy.uint32(299)
    total += rgb[..., 1] * numpy.uint32(587)
    total += rgb[..., 2] * numpy.uint32(114)
    total += numpy.uint32(500)
    result: NDArray[numpy.uint8] = (total // numpy.uint32(1000)).astype(numpy.uint8)
    return result


def _load(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual metadata, which is not used
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            Image.init()
            image = Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])  # builds differ
            if image.width * image.height <= MAX_PIXELS:
                image.load()
    except UnidentifiedImageError:
        raise ValueError(f"the {len(data):,} bytes are not an image in one of the formats {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(f"the image has more than the limit of {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error and others
        raise ValueError(f"the image is damaged or truncated ({reason(error)}); download or copy it again") from None
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"the image has {image.width:,} x {image.height:,} pixels, more than the limit of {MAX_PIXELS:,}")
    return image


def _gray_values(image: Image.Image) -> NDArray[numpy.uint8]:
    if image.mode == "L" and "transparency" not in image.info:
        return numpy.array(image)
    if image.mode.startswith("I"):
        return _from_16_bits(numpy.array(image))
    if image.mode == "F":
        raise ValueError("the image has floating-point values of unknown range; save it with 8 or 16 bits")
    try:
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    except Exception as error:
        raise ValueError(f"the colors of the image ({image.mode}) cannot be converted: {reason(error)}") from None
    return gray_of_rgb(numpy.asarray(image))


def _from_16_bits(values: NDArray[Any]) -> NDArray[numpy.uint8]:
    if values.size and not 0 <= int(values.min()) <= int(values.max()) <= 65_535:
        raise ValueError("the image has values beyond 16 bits; save it with 8 or 16 bits")
    return ((values.astype(numpy.uint32) + 128) // 257).astype(numpy.uint8)
