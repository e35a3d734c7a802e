"""OpenCL devices for rammer: AMD GPUs first, and any CPU with an OpenCL runtime."""
