"""An emulator of CUDA kernels on the host, for tests: the threads of a block alternate."""
