"""Running: executables, sessions, and the operators that stay on the host."""
