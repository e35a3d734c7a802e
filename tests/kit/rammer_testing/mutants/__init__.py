"""Files that somebody or something changed: models, compiled files, kernel stores and kept programs with faults put in.

``python -m rammer_testing.mutants --kind model --device ipu_sim --count 500``. Each mutant is given to the command line in a
child with two cores, 20 s and 2 GiB (``rammer_testing.sandbox``); whatever is no clear error and no right run is shrunk and kept.
Which numbers are right ``value`` asks the voices.
"""
