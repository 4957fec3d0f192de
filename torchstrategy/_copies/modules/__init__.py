"""The replicas' copies of the user's modules, kept in step with the user's own.

It answers: what is shared and what is copied, when is a copy brought up to date, and
where do running statistics and plain attributes of replicas become the user's?

    module_replica        one replica's copies of modules and variables
    waiting_attributes    the large attributes that wait until a step reads them
    plain_attributes      what plain attributes hold, in modules and their copies
    running_statistics    their means on accelerators, which the host does not read
    replicated_modules    all replicas' copies, kept in step with the user's modules
"""
