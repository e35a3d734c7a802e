"""Single operators over their whole attribute spaces: generators, the voices that judge them, and what was decided."""
