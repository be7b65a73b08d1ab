"""Encryption at rest: files of an artifact in AES-256-GCM chunks, under a per-artifact key that is wrapped by
another.

A chunk's nonce consists of the file number, the chunk number and a last-chunk flag, so that chunks cannot be
reordered, omitted or moved to another file unnoticed (the STREAM construction of Hoang, Reyhanitabar, Rogaway and
Vizár, 2015). A nonce is never reused with a key: each artifact has a new one.
"""

import base64
import binascii
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from forebay.registry.sources import SourceError

CHUNK_BYTES: Final = 1024 * 1024
TAG_BYTES: Final = 16
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
COMMAND_TIMEOUT_S: Final = 30
FILES_MAX: Final = 2**32
CHUNKS_MAX: Final = 2**56
_LABEL: Final = b"forebay artifact key v1"
MADE_WITH: Final = "`openssl rand -base64 32 > FILE` makes one"


class Wrapper(Protocol):
    """Holds the key-encryption key. Both methods raise `SourceError`."""

    def wrap(self, key: bytes) -> str:
        """Encrypt a key for storage."""
        ...

    def unwrap(self, wrapped: str) -> bytes:
        """Decrypt a stored key."""
        ...


class KeyFile:
    """A 256-bit key in a file, base64."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def wrap(self, key: bytes) -> str:
        """The key encrypted, preceded by its nonce, base64."""
        nonce = os.urandom(NONCE_BYTES)
        return base64.b64encode(nonce + self._cipher().encrypt(nonce, key, _LABEL)).decode()

    def unwrap(self, wrapped: str) -> bytes:
        """Decrypt a wrapped key."""
        try:
            sealed = base64.b64decode(wrapped, validate=True)
            return self._cipher().decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _LABEL)
        except (InvalidTag, binascii.Error, ValueError) as error:
            raise SourceError(
                f"{self._path}: is not the key that wrapped this artifact's key, or the wrapped key was changed"
            ) from error

    def _cipher(self) -> AESGCM:
        try:
            key = base64.b64decode(self._path.read_bytes().strip(), validate=True)
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be read ({error.strerror}); {MADE_WITH}") from error
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise SourceError(f"{self._path}: not a key of {KEY_BYTES} bytes in base64; {MADE_WITH}")
        return AESGCM(key)


class KeyCommand:
    """A key management service via a program: called with `wrap` or `unwrap`, base64 on stdin and stdout."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    def wrap(self, key: bytes) -> str:
        """The output of the program for the key."""
        return self._ask("wrap", base64.b64encode(key).decode())

    def unwrap(self, wrapped: str) -> bytes:
        """Decrypt a wrapped key."""
        try:
            key = base64.b64decode(self._ask("unwrap", wrapped), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise SourceError(f"{self._command[0]} unwrap: did not return a key of {KEY_BYTES} bytes in base64")
        return key

    def _ask(self, what: str, text: str) -> str:
        try:
            done = subprocess.run(
                [*self._command, what],
                input=text,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise SourceError(f"{self._command[0]} {what}: {error}") from error
        if done.returncode != 0 or not done.stdout.strip():
            said = done.stderr.strip().splitlines()
            raise SourceError(f"{self._command[0]} {what}: ended with {done.returncode}: {said[-1] if said else ''}")
        return done.stdout.strip()


def seal(chunks: Iterable[bytes], target: BinaryIO, key: bytes, number: int) -> None:
    """Encrypt the content of the chunks, however it is divided, as the file of that number."""
    cipher, kept, at = AESGCM(key), bytearray(), 0
    for chunk in chunks:
        kept += chunk
        while len(kept) > CHUNK_BYTES:  # the last chunk must be known as such
            target.write(cipher.encrypt(_nonce(number, at, last=False), bytes(kept[:CHUNK_BYTES]), None))
            del kept[:CHUNK_BYTES]
            at += 1
    target.write(cipher.encrypt(_nonce(number, at, last=True), bytes(kept), None))


def unseal(source: BinaryIO, key: bytes, number: int) -> Iterator[bytes]:
    """Decrypt in chunks, each authenticated. Raises `SourceError` at the first one that was modified."""
    cipher, at = AESGCM(key), 0
    chunk = source.read(CHUNK_BYTES + TAG_BYTES)
    while True:
        following = source.read(CHUNK_BYTES + TAG_BYTES)
        try:
            yield cipher.decrypt(_nonce(number, at, last=not following), chunk, None)
        except (InvalidTag, ValueError) as error:
            raise SourceError(f"chunk {at} was changed, or belongs elsewhere") from error
        if not following:
            return
        chunk, at = following, at + 1


def _nonce(number: int, at: int, *, last: bool) -> bytes:
    assert number < FILES_MAX
    assert at < CHUNKS_MAX
    return number.to_bytes(4, "big") + at.to_bytes(7, "big") + (b"\1" if last else b"\0")
