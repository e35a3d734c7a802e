"""Running: executables, sessions, inputs, bound calls, and programs in the host's memory."""
