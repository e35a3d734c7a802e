"""The core's emitter, and tiles for it."""
