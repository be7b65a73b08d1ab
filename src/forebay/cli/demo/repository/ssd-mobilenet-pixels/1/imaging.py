"""Decodes image files to arrays, whatever their format, within limits on their size."""

import io
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Decoders of other formats are less well reviewed."""
PIXELS_MAX = 40_000_000
"""More than phone cameras usually have; checked before decoding."""
SIDE_MAX = 30_000
"""Maximum width or height in pixels."""
TAKEN = f"at most {PIXELS_MAX // 1_000_000} megapixels and {SIDE_MAX} pixels a side are taken"


class BadImage(Exception):  # noqa: N818 - states the condition
    """The bytes are no acceptable image; the text is for the client."""


class Picture(NamedTuple):
    """`pixels` is uint8 [height, width, 3], RGB, upright; it may be smaller than the image in the file."""

    pixels: np.ndarray
    width: int
    height: int
    """Size of the image in the file, upright."""


def decode(data, least=0):
    """The first picture of a file. With `least`, its shorter side need not have more pixels than about that.

    Raises `BadImage`.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check(image.size)
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # orientations that swap the sides
            width, height = image.size[::-1] if turned else image.size
            if least:
                shrink = max(1.0, min(image.size) / least)
                image.draft("RGB", tuple(max(1, int(side / shrink)) for side in image.size))
            pixels = np.asarray(opaque(ImageOps.exif_transpose(image)))
    except BadImage:
        raise
    except Image.DecompressionBombError:
        raise BadImage(f"too many pixels; {TAKEN}") from None
    except UnidentifiedImageError:
        raise BadImage(f"not an image that can be read; known formats: {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise arbitrary errors for malformed files
        raise BadImage(f"not an image that can be read ({error or type(error).__name__})") from error
    return Picture(pixels, width, height)


def check(size):
    """Raises `BadImage` if the width or height is too large, or the aspect ratio too extreme."""
    width, height = size
    if width * height > PIXELS_MAX or max(size) > SIDE_MAX:
        raise BadImage(f"{width} x {height} pixels; {TAKEN}")


def opaque(image):
    """RGB; transparency is put on white, and grey with more than 8 bits is scaled to 8 by its maximum.

    Floats of at most 1 are shares of white; negative values and NaN are black.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        levels = np.nan_to_num(np.asarray(image, np.float32)).clip(0)
        brightest = levels.max()
        white = 1 if image.mode == "F" and brightest <= 1 else max(brightest, 255)
        return Image.fromarray((levels / white * 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def resized(pixels, width, height):
    """The resized pixels; averaged if they get smaller."""
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=3.0))
