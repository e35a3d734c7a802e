"""The tile graph: connecting, stitching and tile search."""
