"""Files that outlive a process: written atomically, verified when read."""
