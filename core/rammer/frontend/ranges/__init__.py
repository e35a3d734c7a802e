"""Dynamic shapes: one program for a range of lengths."""
