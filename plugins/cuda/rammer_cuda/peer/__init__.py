"""Transfers between GPUs of one host: one-sided writes over NVLink or PCIe, with flags in the receiver's memory."""
