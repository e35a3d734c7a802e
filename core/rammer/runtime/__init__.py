"""Execution of compiled models: executables, compiled files, inputs, bound calls, and programs in host memory."""
