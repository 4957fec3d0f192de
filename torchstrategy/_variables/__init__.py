"""Variables: tensors that replicas share and assign.

`Variable(...)` creates a variable of the kind that suits the strategy in whose scope it
is created. In a replica, the variable reads and writes this replica's component;
outside of replicas, it has one value.

    variable    a variable with one value, which is the base class of all variables
    kinds       variables with a component for each replica, and their methods
"""
