"""Two products in a row, the first of which stays on chip."""
