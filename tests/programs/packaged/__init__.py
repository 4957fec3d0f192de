"""A package that is run with -m, and has its model in a module of its own."""
