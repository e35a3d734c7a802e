"""The test kit of rammer: the conformance checks of devices, searches with random models, and small and trained models."""
