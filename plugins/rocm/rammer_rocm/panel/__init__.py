"""Matrix products and convolutions of floats: panels of rows times panels of columns."""
