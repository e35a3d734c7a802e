"""Passes from Graph to Graph: each is a frozen value whose ``str`` is its spelling; ``pipeline`` runs and verifies them."""
