"""Execution of models: executables, sessions, inputs, bound calls, and programs in host memory."""
