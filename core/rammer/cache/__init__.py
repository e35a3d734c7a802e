"""Files that outlive a process: written whole, verified when read."""
