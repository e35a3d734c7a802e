"""Reports on partitioned models."""
