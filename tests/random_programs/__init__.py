"""Random training programs, each run in plain PyTorch and in replicas, and compared.

A program is data: layers, what a step does, what happens between steps, and where it
runs. Each part is a few lines of a user's code, and knows nothing of strategies; only
the loop around the parts differs, see `execution`.

    programs      what a program is, and how it is printed
    layers        what models are made of; `modules` and `marked` have the classes that
                  torch has not
    keeping       hooks that keep what they see outside of the model
    optimizers    torch's own, and such as users write
    actions       what a step does, and what comes right before and after it
    events        what a user does between steps; `writing` has the ways of writing on a
                  tensor
    topologies    where a program runs
    execution     the loops: plain, under a strategy, with DataParallel
    comparison    everything that a program leaves behind, and what differs
    trials        what came of a program: equal, refused, different, failed; `refusals`
                  are the documented ones
    generation    seeded programs
    shrinking     a shorter program with the same fault
    workers       processes that run programs

`python -m tests.random_programs --count 20000 --seed 1` runs any number from any seed.
"""
