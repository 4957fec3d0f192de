"""What is there for TensorFlow's sake: cross-device operations, and options.

It answers: what does a program mean that names the way in which values travel? The
names are public in `torchstrategy` and `torchstrategy.experimental`. What else
TensorFlow has is where users import it: `torchstrategy.cluster_resolver`,
`torchstrategy.experimental` and `torchstrategy.compat.v1`.

    options             what a person says about how values travel, checked here
    cross_device_ops    the public ways to reduce and broadcast between devices
"""
