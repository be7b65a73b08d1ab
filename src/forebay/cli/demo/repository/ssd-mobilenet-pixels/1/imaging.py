"""Decodes image files to arrays, whatever their format, within limits on their size."""

import io
import re
import struct
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Decoders of other formats are less well reviewed."""
PIXELS_MAX = 40_000_000
"""More than phone cameras usually have; checked before decoding."""
SIDE_MAX = 30_000
"""Maximum width or height in pixels."""
TIFF_SIDES = ((256, 322), (257, 323))
"""The tags of a TIFF's width and tile width, and of its height and tile height."""
SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
"""The start of a scan of a JPEG, with its length and its number of components."""
SCANS_MAX = 100
"""Usual progressive JPEGs have about ten. Each costs a pass over all pixels, and may have next to no bytes."""
EXIF = re.compile(rb"\xff\xe1..Exif\0\0", re.DOTALL)
"""The start of a part of a JPEG's EXIF data."""
EXIF_PARTS_MAX = 100
"""A part has up to 64 kB, and usual files have one. Pillow copies what it has for each further one."""
TURN = Image.Transpose
TURNS = {
    2: TURN.FLIP_LEFT_RIGHT, 3: TURN.ROTATE_180, 4: TURN.FLIP_TOP_BOTTOM,
    5: TURN.TRANSPOSE, 6: TURN.ROTATE_270, 7: TURN.TRANSVERSE, 8: TURN.ROTATE_90,
}  # fmt: skip
"""What turns a picture upright, by its orientation in EXIF; from 5 on the sides are swapped."""
UNREADABLE = (ArithmeticError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error)
"""What malformed metadata raises."""
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
    if len(EXIF.findall(data)) > EXIF_PARTS_MAX:
        raise BadImage(f"EXIF data in more than {EXIF_PARTS_MAX} parts")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check(image.size)
            if image.format == "TIFF":
                check_tiles(data, image.tag_v2)
            elif image.format in ("JPEG", "MPO"):
                check_scans(data)
            size = image.size
            shrink = max(1.0, min(size) / least) if least else 1.0
            if shrink == 1.0 or image.draft("RGB", tuple(max(1, int(side / shrink)) for side in size)) is None:
                image.load()
                size = image.size  # of TIFF, loading has turned the picture upright
            turn = orientation(image)
            width, height = size[::-1] if turn > 4 else size
            pixels = np.asarray(opaque(image.transpose(TURNS[turn]) if turn in TURNS else image))
    except BadImage:
        raise
    except Image.DecompressionBombError:
        raise BadImage(f"too many pixels; {TAKEN}") from None
    except UnidentifiedImageError:
        raise BadImage(f"not an image that can be read; known formats: {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise arbitrary errors for malformed files
        raise BadImage(f"not an image that can be read ({error or type(error).__name__})") from error
    return Picture(pixels, width, height)


def orientation(image):
    """The orientation in a picture's metadata; 1, upright, if there is none that can be read."""
    try:
        found = image.getexif().get(0x0112, 1)
        return int(found) if found in TURNS else 1
    except UNREADABLE:  # viewers show the picture without it, too
        return 1


def check(size):
    """Raises `BadImage` if the width or height is too large, or the aspect ratio too extreme."""
    width, height = size
    if width * height > PIXELS_MAX or max(size) > SIDE_MAX:
        raise BadImage(f"{width} x {height} pixels; {TAKEN}")


def check_tiles(data, tags):
    """Raises `BadImage` if the tiles of a TIFF are too large: libtiff decodes them whole, beyond the picture too."""
    if data.startswith(b"MM\0+"):  # Pillow reads the entries as those of a plain TIFF
        raise BadImage("big-endian BigTIFF is not read")
    start, order = tags.offset, "<" if tags.prefix == b"II" else ">"
    first, step, count = (8, 20, "Q") if data[2] == 43 else (2, 12, "H")
    (count,) = struct.unpack_from(order + count, data, start)
    places = range(start + first, start + first + count * step, step)
    listed = [struct.unpack_from(order + "H", data, place)[0] for place in places]
    if any(listed.count(tile) != (tile in tags) for _, tile in TIFF_SIDES):
        raise BadImage("the size of its tiles is ambiguous")  # libtiff reads other values than Pillow
    check([max(tags[side], tags.get(tile, 1)) for side, tile in TIFF_SIDES])


def check_scans(data):
    """Raises `BadImage` if a JPEG has too many scans."""
    scans = len(SCAN.findall(data))
    if scans > SCANS_MAX:
        raise BadImage(f"a JPEG of {scans} scans; at most {SCANS_MAX} are taken")


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


def squares(files, side):
    """Pixels of each file resized to a square, uint8 [n, side, side, 3], and width and height of each, int32 [n, 2].

    Raises `BadImage` with the index of the file.
    """
    pixels, sizes = np.empty((len(files), side, side, 3), np.uint8), np.empty((len(files), 2), np.int32)
    for row, file in enumerate(files):
        try:
            picture = decode(file, side)
        except BadImage as error:
            raise BadImage(f"image[{row}]: {error}") from error
        pixels[row] = resized(picture.pixels, side, side)
        sizes[row] = picture.width, picture.height
        del picture  # only one is kept in full size: each may take 120 MB
    return pixels, sizes
