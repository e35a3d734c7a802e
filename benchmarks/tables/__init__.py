"""The tables of ``python -m benchmarks``: each is a function from Settings to a Result."""
