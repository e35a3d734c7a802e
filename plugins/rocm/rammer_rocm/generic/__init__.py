"""The core's emitter in the OpenCL dialect, for every operator."""
