"""Execution of one model on several devices."""
