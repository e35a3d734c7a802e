"""Keys of cached programs and measurements."""

from __future__ import annotations

import hashlib

from rammer.device.manifest import Backend

#: Incremented when the meaning of an entry or of a key changes; older entries are then misses.
KEY_VERSION = 2


def unit_key(backend: Backend) -> str:
    """Return the key of a device unit and its number of vEUs: a process may have some of a CPU's cores."""
    return f"{backend.fingerprint} {backend.vdevice.veus}"


def key_of(*parts: str) -> str:
    """Return a content hash of the parts."""
    digest = hashlib.sha256()
    for part in (str(KEY_VERSION), *parts):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()
