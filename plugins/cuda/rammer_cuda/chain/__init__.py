"""Products in a row, in one launch: all but the last stay on chip."""
