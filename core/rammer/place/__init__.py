"""Where the parts of a model run, of several devices: cuts, what they are predicted to take, and the Spread made of one."""
