"""Images as arrays of gray values, and the batches of CIFAR-10."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from permuteformer.tasks.readers.pickles import PickledArray, plain_pickle
from permuteformer.tasks.readers.unpacking import reason

MAX_PIXELS = 64 << 20
"""A small file may hold an image of any size."""

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "DIB", "PPM", "TIFF", "WEBP", "TGA", "PCX", "ICO", "SGI", "JPEG2000", "AVIF", "QOI", "XBM")
"""Pictures that Pillow reads by itself. For EPS it would start another program."""


def gray_image(data: bytes, size: tuple[int, int] | None = None) -> NDArray[numpy.uint8]:
    """The gray values of an image file, uint8 (height, width): see ``gray_of_rgb`` for those of colours.

    Palettes are looked up. Where an image is transparent, white shows through. 16-bit values are scaled, so that 65,535 becomes 255. Of
    several frames the first is taken. A turn that a camera notes beside the picture (EXIF) is not carried out.

    Args:
        data: the file, in one of ``FORMATS``.
        size: height and width of the result; each of its pixels is the mean of the area that it covers. With ``None``, as in the file.

    Raises:
        ValueError: it is empty, damaged, no image, or has more than ``MAX_PIXELS``.

    >>> file = io.BytesIO()
    >>> Image.new("RGB", (3, 2), "red").save(file, "PNG")
    >>> gray_image(file.getvalue()).tolist()
    [[76, 76, 76], [76, 76, 76]]
    """
    if size is not None and (min(size) < 1 or size[0] * size[1] > MAX_PIXELS):
        raise ValueError(f"size must be height and width from 1 on, with at most {MAX_PIXELS:,} pixels; it is {size}")
    if not data:
        raise ValueError("the image is empty; fetch or copy it again")
    values = _values(_loaded(data))
    if size is None or size == values.shape:
        return values
    return numpy.array(Image.fromarray(values).resize((size[1], size[0]), Image.Resampling.BOX))


def gray_of_rgb(rgb: NDArray[numpy.uint8]) -> NDArray[numpy.uint8]:
    """Gray values of colours (… 3): 0.299 R + 0.587 G + 0.114 B (ITU-R 601), rounded, halves up.

    Computed in whole numbers, so it is exact. Pillow's ``convert("L")`` has weights of 16 bits, and differs by one in 9,040 of the
    16,777,216 colours.

    >>> gray_of_rgb(numpy.array([[255, 0, 0], [255, 255, 255]], dtype=numpy.uint8)).tolist()
    [76, 255]
    """
    total = rgb[..., 0] * numpy.uint32(299)
    total += rgb[..., 1] * numpy.uint32(587)
    total += rgb[..., 2] * numpy.uint32(114)
    total += numpy.uint32(500)
    result: NDArray[numpy.uint8] = (total // numpy.uint32(1000)).astype(numpy.uint8)
    return result


def cifar_batch(data: bytes) -> tuple[NDArray[numpy.uint8], list[int]]:
    """Images (n 3072: 1,024 red values row by row, then green, then blue) and labels (0 to 9) of a batch file of CIFAR-10.

    The batches are pickles; this reads them without running what they say (see ``plain_pickle``).

    Raises:
        ValueError: it is no such batch.
    """
    batch = plain_pickle(data)
    if not isinstance(batch, dict):
        raise ValueError(f"a batch of CIFAR-10 must be a dict; this is a {type(batch).__name__}")
    images, labels = (batch.get(name.encode(), batch.get(name)) for name in ("data", "labels"))
    if not isinstance(images, PickledArray) or not isinstance(labels, list):
        raise ValueError("a batch of CIFAR-10 must have an array 'data' and a list 'labels'; this is something else")
    values = images.values()
    if values.ndim != 2 or values.shape[1] != 3072 or len(labels) != len(values):
        raise ValueError(f"'data' must be of shape (n, 3072) with n labels; it is {values.shape} with {len(labels):,} labels")
    if not all(type(label) is int and 0 <= label <= 9 for label in labels):
        raise ValueError("'labels' must be whole numbers from 0 to 9")
    return values, labels


def _loaded(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, which is not used
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            Image.init()
            image = Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])  # some builds lack a few
            if image.width * image.height <= MAX_PIXELS:
                image.load()
    except UnidentifiedImageError:
        raise ValueError(f"this is no image that can be read ({len(data):,} bytes); it must be one of {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(f"the image has more than {MAX_PIXELS:,} pixels, which is the limit") from None
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, struct.error and others
        raise ValueError(f"the image is damaged or cut off ({reason(error)}); fetch or copy it again") from None
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"the image has {image.width:,} x {image.height:,} pixels; the limit is {MAX_PIXELS:,} in all")
    return image


def _values(image: Image.Image) -> NDArray[numpy.uint8]:
    if image.mode == "L" and "transparency" not in image.info:
        return numpy.array(image)
    if image.mode.startswith("I"):
        return _from_16_bits(numpy.array(image))
    if image.mode == "F":
        raise ValueError("the image holds fractions, whose black and white are not known; save it with 8 or 16 bits")
    try:
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    except Exception as error:
        raise ValueError(f"the image's colours ({image.mode}) cannot be converted: {reason(error)}") from None
    return gray_of_rgb(numpy.asarray(image))


def _from_16_bits(values: NDArray[Any]) -> NDArray[numpy.uint8]:
    if values.size and not 0 <= int(values.min()) <= int(values.max()) <= 65_535:
        raise ValueError("the image holds values beyond 16 bits; save it with 8 or 16 bits")
    return ((values.astype(numpy.uint32) + 128) // 257).astype(numpy.uint8)
