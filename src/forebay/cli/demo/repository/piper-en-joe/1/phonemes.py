"""Converts text to the phonemes of Piper voices, by sentence: espeak-ng through its C interface."""

import ctypes
import re
from collections.abc import Iterator
from ctypes.util import find_library
from textwrap import wrap

INITIALIZE_DONT_EXIT = 0x8000
SYNCHRONOUS = 2
"""`AUDIO_OUTPUT_SYNCHRONOUS`: no playback, and no thread for it."""
UTF8 = 1
IPA = 2
_MARK = re.compile(r"([.,;:!?\u2014\u2026])[\"'\u201d\u2019)\]]*\s*\S?\s*$")
"""The punctuation mark at the end of a clause; espeak-ng has read one character of the next clause."""
_ABBREVIATION = re.compile(r"\b(Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e)\.\s*\S?\s*$", re.I)
_SWITCH = re.compile(r"\([a-z0-9-]{2,}\)")
"""The language of the phonemes that follow, as in `(ko)`. Parentheses of the text never get into the phonemes."""
_AS = {"\u2014": ",", "\u2026": "."}
PHONEMES_MAX = 500
"""Maximum length of a sentence: the memory that a voice needs grows with its square."""
SENTENCE_ENDS = ".!?"
WORD_BYTES = 8
"""How far before its start a clause is searched: the start of its first word may have been consumed already."""


class Phonemizer:
    """espeak-ng with one voice. It is not thread-safe, and there is one per process."""

    def __init__(self, voice: str) -> None:
        library, data = _found()
        self._lib = lib = ctypes.CDLL(library)
        lib.espeak_TextToPhonemes.restype = ctypes.c_char_p
        lib.espeak_TextToPhonemes.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int]
        if lib.espeak_Initialize(SYNCHRONOUS, 0, data, INITIALIZE_DONT_EXIT) < 0:
            raise RuntimeError(f"espeak-ng cannot start with its data in {data!r}")
        if lib.espeak_SetVoiceByName(voice.encode()):
            raise RuntimeError(f"espeak-ng has no voice {voice!r}")

    def sentences(self, text: str) -> Iterator[str]:
        """The phonemes of each sentence, with its punctuation; sentences that are too long are split."""
        spoken = ""
        for clause, phonemes in self._clauses(text):
            mark = _mark(clause)
            spoken += phonemes + mark + " "
            if mark and mark in SENTENCE_ENDS:
                yield from _parts(spoken)
                spoken = ""
        yield from _parts(spoken)

    def _clauses(self, text: str) -> Iterator[tuple[str, str]]:
        """Clauses, with some preceding characters, and their phonemes."""
        data = text.replace("\0", " ").encode()
        buffer = ctypes.create_string_buffer(data)
        start = ctypes.addressof(buffer)
        at = ctypes.c_void_p(start)
        before = 0
        while at.value is not None:
            phonemes = self._lib.espeak_TextToPhonemes(ctypes.byref(at), UTF8, IPA) or b""
            now = len(data) if at.value is None else at.value - start
            yield data[max(0, before - WORD_BYTES) : now].decode(errors="replace"), _SWITCH.sub("", phonemes.decode())
            before = now


def _parts(spoken: str) -> list[str]:
    return [each for each in wrap(spoken, PHONEMES_MAX) if any(sound.isalpha() for sound in each)]


def _mark(clause: str) -> str:
    found = _MARK.search(clause)
    if found is None or _ABBREVIATION.search(clause):
        return ""
    return _AS.get(found[1], found[1])


def _found() -> tuple[str, bytes | None]:
    """The library and its data: from the package `espeakng-loader`, else from the system."""
    try:
        import espeakng_loader
    except ImportError:
        library = find_library("espeak-ng")
        if library is None:
            raise RuntimeError(
                "espeak-ng is needed: pip install espeakng-loader, or the system's libespeak-ng1"
            ) from None
        return library, None
    return espeakng_loader.get_library_path(), espeakng_loader.get_data_path().encode()
