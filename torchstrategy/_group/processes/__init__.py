"""Several processes that train together.

They meet, send each other values, and find out which of them is lost.

    wire                  values as bytes without code, as workers send them
    comparisons           what workers compare, as bytes and in words
    bounded               calls that may never return
    inherited             what a process that is forked from a worker gives back
    lifelines             connections between workers: why, and that, one is lost
    network_interfaces    the addresses of the interfaces that the user has chosen
    blame                 which worker is lost, and why
    meeting               how workers find each other, and who has not come
    joining               how a process joins groups of torch, and leaves them
    operations            operations of `torch.distributed`, and how they end
    process_group         workers that a group of `torch.distributed` joins
"""
