"""Keys of cached programs and measurements."""

from __future__ import annotations

import hashlib

from rammer.device.manifest import Backend


def unit_key(backend: Backend) -> str:
    """Return the key of a device unit and its number of vEUs: a process may have some of a CPU's cores."""
    return f"{backend.fingerprint} {backend.vdevice.veus}"


def key_of(*parts: str) -> str:
    """Return a content hash of the parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()
