"""Assignment of a model's operators to devices."""
