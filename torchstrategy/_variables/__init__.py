"""Variables: tensors that replicas share and assign.

`Variable(...)` chooses a kind for the strategy in whose scope it is created. In a replica the variable reads and
writes that replica's component; outside it is one value.

    variable       what every variable is
    kinds          one copy for all replicas, a copy in each, or a value in each
    of_extended    the methods of `Strategy.extended` that take variables
"""
