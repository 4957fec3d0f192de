"""torch's own databases of operators, modules and optimizers, on a simulated device.

They are run there and compared with the CPU.

    python tests/sweep                                    all of it; some minutes
    python tests/sweep operators --only add,sort          some entries
    python tests/sweep operators --dtype bfloat16 --samples 10

An *entry* of a database has *trials*: a sample of it, and a way to use it. A trial is
run on the CPU and on a simulated device, on copies of the same sample; results,
gradients and what becomes of the inputs have to agree. `exceptions` says which entries
do not, and why.
"""
