"""Running a partitioned model."""
