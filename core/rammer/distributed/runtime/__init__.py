"""Execution of a partitioned model."""
