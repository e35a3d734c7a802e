"""The reader from a file to a Model: parsing, validation, opset upgrade."""
