"""The persistent executor: one cooperative launch whose blocks walk the rows of the program's table."""
