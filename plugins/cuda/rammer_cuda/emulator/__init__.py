"""CUDA kernels on the host, for tests: a block of threads that take turns."""
