"""The copies of the user's modules that replicas have, kept in step with the user's own.

It answers: what is shared and what is copied, when is a copy brought up to date, and where do running statistics and
plain attributes of replicas become the user's?

    module_replica        the copies of the user's modules and variables that one replica has
    waiting_attributes    the large attributes that wait until a step reads them
    plain_attributes      what plain attributes hold, in the user's modules and in the replicas' copies
    running_statistics    the means of running statistics on accelerators, which the host does not read
    replicated_modules    the copies of all replicas, kept in step with the user's modules
"""
