"""Variables: tensors that replicas share and assign.

`Variable(...)` creates a variable of the kind that suits the strategy in whose scope it is created. In a replica, the
variable reads and writes this replica's component; outside of replicas, it has one value.

    variable       the base class of all variables
    kinds          one copy for all replicas, a copy in each, or a value in each
    of_extended    the methods of `Strategy.extended` that take variables
"""
