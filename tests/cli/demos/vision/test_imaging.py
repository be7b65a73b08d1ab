"""Image decoding: every supported format is read, and anything else is rejected."""

import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.demos.vision.rig import loaded

Image = pytest.importorskip("PIL.Image", reason="needs the extra 'vision'")
imaging = loaded("ssd-mobilenet-pixels", "imaging.py")

ORIENTATION = 0x0112
BACK = {
    1: (), 2: ("FLIP_LEFT_RIGHT",), 3: ("ROTATE_180",), 4: ("FLIP_TOP_BOTTOM",),
    5: ("TRANSPOSE",), 6: ("ROTATE_90",), 7: ("TRANSVERSE",), 8: ("ROTATE_270",),
}  # fmt: skip
"""What was done to a picture that is stored with an orientation."""


def quarters(width: int = 64, height: int = 32) -> Any:
    """Red and green above, blue and white below."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 255, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    pixels[height // 2 :, width // 2 :] = (255, 255, 255)
    return Image.fromarray(pixels)


def stored(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def near(found: "np.ndarray[Any, Any]", wanted: Any) -> bool:
    """Whether the middles of the quarters have the colours that they should."""
    height, width = found.shape[:2]
    rows, columns = [height // 4, height * 3 // 4], [width // 4, width * 3 // 4]
    whole = np.asarray(wanted.resize((width, height)), np.int32)
    places = np.ix_(rows, columns)
    return bool(np.abs(found[places].astype(np.int32) - whole[places]).max() < 40)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", sorted(BACK))
def test_exif_orientation_is_applied(orientation: int, kind: str) -> None:
    image = quarters()
    for step in BACK[orientation]:
        image = image.transpose(Image.Transpose[step])
    exif = Image.Exif()
    exif[ORIENTATION] = orientation

    for least in (0, 8):
        picture = imaging.decode(stored(image, kind, quality=95, exif=exif), least)

        assert (picture.width, picture.height) == (64, 32)
        assert near(picture.pixels, quarters())


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_images_with_unreadable_exif_are_read(kind: str) -> None:
    picture = imaging.decode(stored(quarters(), kind, exif=b"no TIFF header"))

    assert (picture.width, picture.height) == (64, 32)
    assert near(picture.pixels, quarters())


def test_orientation_counts_beside_malformed_tags() -> None:
    orientation = struct.pack("<HHII", ORIENTATION, 3, 1, 6)
    resolution_as_text = struct.pack("<HHI4s", 0x011A, 2, 4, b"72")
    exif = struct.pack("<6s4sIH", b"Exif", b"II*", 8, 2) + orientation + resolution_as_text + bytes(4)
    image = quarters().transpose(Image.Transpose.ROTATE_90)

    picture = imaging.decode(stored(image, "JPEG", quality=95, exif=exif))

    assert (picture.width, picture.height) == (64, 32)
    assert near(picture.pixels, quarters())


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("CMYK", "TIFF"), ("RGB", "BMP")],
)
def test_colours_are_the_same_in_every_mode(mode: str, kind: str) -> None:
    picture = imaging.decode(stored(quarters().convert(mode), kind))

    assert picture.pixels.dtype == np.uint8
    assert near(picture.pixels, quarters())


@pytest.mark.parametrize("mode", ["1", "L", "LA", "I;16", "I"])
def test_greyscale_images_become_grey_rgb(mode: str) -> None:
    grey = np.tile(np.array([0, 255], np.uint8).repeat(32), (32, 1))
    if mode.startswith("I"):
        image = Image.fromarray(grey.astype(np.uint16) * 257)
        image = image.convert("I") if mode == "I" else image
    else:
        image = Image.fromarray(grey).convert(mode)

    pixels = imaging.decode(stored(image, "TIFF" if mode == "I" else "PNG")).pixels

    assert pixels.shape == (32, 64, 3)
    assert pixels[16, [8, 56]].tolist() == [[0, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize(
    ("levels", "greys"),
    [
        (np.float32([0, 0.2, 1]), [0, 51, 255]),
        (np.float32([0, 51, 255]), [0, 51, 255]),
        (np.float32([0, 200, 1000]), [0, 51, 255]),
        (np.float32([np.nan, -3, 1]), [0, 0, 255]),
        (np.float32([0, 0, 0]), [0, 0, 0]),
        (np.int32([-5, 200, 1000]), [0, 51, 255]),
    ],
)
def test_float_and_signed_greyscale_is_not_black(levels: "np.ndarray[Any, Any]", greys: list[int]) -> None:
    pixels = imaging.decode(stored(Image.fromarray(np.tile(levels, (2, 1))), "TIFF")).pixels

    assert pixels[0].tolist() == [[grey] * 3 for grey in greys]


def test_transparent_pixels_become_white() -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))

    assert (imaging.decode(stored(image, "PNG")).pixels == 255).all()


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 500), (1600, 900), (900, 1600), (300, 299)])
def test_images_are_not_downscaled_below_the_required_size(width: int, height: int) -> None:
    picture = imaging.decode(stored(quarters(width, height), "JPEG"), 300)

    assert (picture.width, picture.height) == (width, height)
    assert min(picture.pixels.shape[:2]) >= min(width, height, 300)
    assert picture.pixels.size <= width * height * 3


@pytest.mark.parametrize(("width", "height"), [(6325, 6325), (30_001, 1), (1, 30_001)])
def test_too_large_images_are_not_decoded(width: int, height: int) -> None:
    with pytest.raises(imaging.BadImage, match="at most 40 megapixels and 30000 pixels a side"):
        imaging.decode(stored(Image.new("1", (width, height)), "PNG"))


SHORT, LONG, SLONG8 = 3, 4, 17


def tiled(side: int, tiles: list[tuple[int, int]], *, big: bool = False, order: str = "<") -> bytes:
    """A white TIFF of one square tile; `tiles` are the entries for its sides, each with type and value."""
    data = zlib.compress(b"\xff" * side * side)
    entries = [(256, SHORT, 10), (257, SHORT, 10), (258, SHORT, 8), (259, SHORT, 8), (262, SHORT, 1), (277, SHORT, 1)]
    entries += [(tag, kind, value) for tag in (322, 323) for kind, value in tiles]
    entries += [(324, LONG, 16), (325, LONG, len(data))]
    head, count, number, field = ("HHHQ", "Q", "Q", 8) if big else ("HI", "H", "I", 4)
    versions = (43, 8, 0) if big else (42,)
    start = struct.pack(order + head, *versions, 16 + len(data))
    file = (b"II" if order == "<" else b"MM") + start
    file = file.ljust(16, b"\0") + data + struct.pack(order + count, len(entries))
    for tag, kind, value in entries:
        inline = struct.pack(order + ("H" if kind == SHORT else "I"), value)
        file += struct.pack(order + "HH" + number, tag, kind, 1) + inline.ljust(field, b"\0")
    return file + bytes(8)


@pytest.mark.parametrize(("big", "order"), [(False, "<"), (False, ">"), (True, "<")])
@pytest.mark.parametrize("kind", [SHORT, LONG])
def test_tiles_of_a_tiff_may_exceed_it(big: bool, order: str, kind: int) -> None:
    pixels = imaging.decode(tiled(256, [(kind, 256)], big=big, order=order)).pixels

    assert (pixels == 255).all()
    assert pixels.shape == (10, 10, 3)


@pytest.mark.parametrize(("big", "order"), [(False, "<"), (False, ">"), (True, "<")])
@pytest.mark.parametrize(
    ("tiles", "says"),
    [
        ([(LONG, 6400)], "6400 x 6400 pixels; at most 40 megapixels"),
        ([(LONG, 6400), (LONG, 16)], "ambiguous"),
        ([(LONG, 16), (LONG, 6400)], "ambiguous"),
        ([(SLONG8, 6400)], "ambiguous"),
    ],
)
def test_too_large_tiles_of_a_tiff_are_not_decoded(
    tiles: list[tuple[int, int]], says: str, big: bool, order: str
) -> None:
    with pytest.raises(imaging.BadImage, match=says):
        imaging.decode(tiled(6400, tiles, big=big, order=order))


def test_big_endian_bigtiff_is_not_decoded() -> None:
    with pytest.raises(imaging.BadImage, match="big-endian BigTIFF"):
        imaging.check_tiles(tiled(16, [(SHORT, 16)], big=True, order=">"), {})


def with_scans(count: int) -> bytes:
    """A progressive JPEG, the last scan of which is repeated until there are `count`."""
    file = stored(quarters(), "JPEG", progressive=True)
    last = file.rindex(b"\xff\xda")
    return file[:last] + file[last:-2] * (count - file.count(b"\xff\xda") + 1) + file[-2:]


@pytest.mark.parametrize("least", [0, 8])
def test_jpeg_with_too_many_scans_is_not_decoded(least: int) -> None:
    assert near(imaging.decode(with_scans(100), least).pixels, quarters())
    with pytest.raises(imaging.BadImage, match="a JPEG of 101 scans; at most 100 are taken"):
        imaging.decode(with_scans(101), least)


def test_jpeg_with_exif_in_too_many_parts_is_not_opened() -> None:
    file, part = stored(quarters(), "JPEG", quality=95), b"\xff\xe1\0\x0aExif\0\0xx"

    assert near(imaging.decode(file[:2] + part * 100 + file[2:]).pixels, quarters())
    with pytest.raises(imaging.BadImage, match="EXIF data in more than 100 parts"):
        imaging.decode(file[:2] + part * 101 + file[2:])


def test_video_behind_a_jpeg_is_not_taken_for_scans() -> None:
    video = b"\xff\xda\x17\x2a" * 1000

    assert near(imaging.decode(stored(quarters(), "JPEG", quality=95) + video).pixels, quarters())


def test_squares_have_the_requested_side_and_keep_the_sizes_of_the_images() -> None:
    pixels, sizes = imaging.squares([stored(quarters(), "PNG"), stored(quarters(500, 900), "PNG")], 32)

    assert (pixels.shape, pixels.dtype, sizes.dtype) == ((2, 32, 32, 3), np.uint8, np.int32)
    assert sizes.tolist() == [[64, 32], [500, 900]]
    assert all(near(each, quarters()) for each in pixels)


def test_unreadable_image_of_several_is_named() -> None:
    with pytest.raises(imaging.BadImage, match=r"image\[1\]: not an image"):
        imaging.squares([stored(quarters(), "PNG"), b"no image"], 32)


def test_images_of_a_batch_are_not_kept_in_full_size() -> None:
    file = stored(Image.new("RGB", (1000, 1000)), "PNG")

    def peak(count: int) -> int:
        tracemalloc.start()
        imaging.squares([file] * count, 300)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)
    assert peak(8) - peak(1) < 1000 * 1000 * 3


@given(st.binary(max_size=300), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]), st.data())
def test_any_bytes_are_an_image_or_rejected(noise: bytes, kind: str, data: st.DataObject) -> None:
    whole = stored(quarters(16, 16), kind)
    at = data.draw(st.integers(0, len(whole)))
    for file in (noise, whole[:at], whole[:at] + noise + whole[at:], whole[:at] + noise + whole[at + len(noise) :]):
        try:
            pixels = imaging.decode(file, 8).pixels
        except imaging.BadImage:
            continue
        assert (pixels.ndim, pixels.shape[2], pixels.dtype) == (3, 3, np.uint8)
