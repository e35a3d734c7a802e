"""Other runtimes on the same models: reference results, and times to compare with."""
