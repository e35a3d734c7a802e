"""Graph -> Graph: each pass a frozen value whose ``str`` is its spelling; ``pipeline`` runs and verifies them."""
