"""Several processes that train together: how they meet, what they send, and who is lost.

It answers: how does a worker find the others, how do bytes travel, and how does each worker hear, by name, of another
one that failed, hangs or is gone? `process_group` is what the rooms above use.

    wire                  values as bytes that hold no code, as workers send them to each other
    comparisons           what workers compare, as bytes and in words
    bounded               calls that may never return
    inherited             what a process that is forked from a worker gives back
    lifelines             connections between all workers, by which they hear why and that one of them is lost
    network_interfaces    the addresses of the network interfaces that the user has chosen
    blame                 which worker is lost, and why
    meeting               how workers find each other, what each tells the others there, and who has not come
    threads               how workers meet that are threads of one process, as tests run them
    joining               how a process joins groups of `torch.distributed`, and leaves them
    operations            operations of `torch.distributed` that are under way, and how they end
    process_group         workers that are joined by a process group of `torch.distributed`
"""
