"""Signatures of compiled files: Ed25519 over all bytes of a file except the signature itself, which ends it.

A signed file ends with the zip's comment ``SEAL signature HEX``. ``cryptography`` (the extra ``sign``) makes and checks
signatures.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

from rammer.errors import BadInput, MissingDependency

#: The text before a signature in the comment, and the hexadecimal digits of a signature.
MARK, DIGITS = b" signature ", 128
#: The comment of a file that will be signed, after its seal.
UNSIGNED: Final = MARK + b"0" * DIGITS
#: The beginning of the signed message, which keeps signatures of other programs from being taken for ours.
DOMAIN: Final = b"rammer compiled file 1\0"
#: Bytes that are hashed at a time, and the maximum bytes of a key's file.
SHARE, LARGEST_KEY = 4 << 20, 1 << 16


def unsigned_comment(comment: bytes) -> bytes:
    """Return a file's comment without the signature. Raises ValueError if the signature is malformed."""
    seal, mark, signature = comment.partition(MARK)
    if mark and (len(signature) != DIGITS or signature.strip(b"0123456789abcdef")):
        raise ValueError("its signature is malformed")
    return seal


def sign_file(file: BinaryIO, key_file: Path) -> None:
    """Write the signature into an open file that ends with the comment ``UNSIGNED``. Raises BadInput for an unusable key."""
    key = _load_key(key_file, private=True)
    file.flush()
    digest = _digest_content(file)
    file.seek(-DIGITS, os.SEEK_END)
    file.write(key.sign(DOMAIN + digest).hex().encode())


def check_signature(path: Path, key_file: Path) -> None:
    """Raise BadInput unless a file has a valid signature of the public key in ``key_file``. All of the file is read."""
    key = _load_key(key_file, private=False)
    from cryptography.exceptions import InvalidSignature

    try:
        with path.open("rb") as file:
            signature = _read_signature(file)
            key.verify(signature, DOMAIN + _digest_content(file))
    except OSError as problem:
        raise BadInput(f"cannot read {path}: {problem.strerror or problem}") from problem
    except ValueError as problem:
        raise BadInput(f"{path} has no signature", "--trust-key", "compile it with --sign KEY.pem") from problem
    except InvalidSignature as problem:
        raise BadInput(
            f"{path} has no valid signature of the key in {key_file}",
            "--trust-key",
            "the file was changed, or signed with another key",
        ) from problem


def check_key(key_file: Path) -> None:
    """Raise BadInput unless ``key_file`` has a private key that can sign."""
    _load_key(key_file, private=True)


def _digest_content(file: BinaryIO) -> bytes:
    """Return the digest of all bytes before the signature."""
    left, digest = file.seek(0, os.SEEK_END) - DIGITS, hashlib.sha512()
    file.seek(0)
    while left > 0 and (share := file.read(min(left, SHARE))):
        digest.update(share)
        left -= len(share)
    return digest.digest()


def _read_signature(file: BinaryIO) -> bytes:
    """Return the signature at the end of a file. Raises ValueError if there is none."""
    if file.seek(0, os.SEEK_END) < len(UNSIGNED):
        raise ValueError("no signature")
    file.seek(-len(UNSIGNED), os.SEEK_END)
    if file.read(len(MARK)) != MARK:
        raise ValueError("no signature")
    return bytes.fromhex(file.read(DIGITS).decode("ascii"))


def _load_key(path: Path, private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as problem:
        raise MissingDependency("cryptography", "pip install 'rammer-runtime[sign]'") from problem
    kind = "private" if private else "public"
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_KEY)
        load: Any = serialization.load_pem_public_key
        key = serialization.load_pem_private_key(data, None) if private else load(data)
    except (OSError, ValueError, TypeError) as problem:
        raise BadInput(f"{path} is not a {kind} key in PEM form", hint=f"{problem}") from problem
    if not isinstance(key, ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey):
        raise BadInput(f"{path} is not an Ed25519 key", hint="openssl genpkey -algorithm ed25519 -out KEY.pem")
    return key
