"""The compiler: from a Model to a verified program."""
