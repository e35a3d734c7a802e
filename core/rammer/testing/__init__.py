"""What plugin authors and the tests import: real models and checks."""
