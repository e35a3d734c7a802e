"""Single operators over their whole attribute spaces: generators, references that judge them, and decisions."""
