"""A worker with one replica, whose step uses the user's own objects.

Such workers exchange nothing but gradients.

Several workers that have a replica each need no copies. The step of each worker uses
the model, the optimizer and all else that the program has, as under
`OneDeviceStrategy`. When a backward ends, the workers weigh and add up its gradients,
so that `.grad` is that of the whole batch, and the update is the same in all workers.

    sharded_models        parameters in parts: who has which, and who sends gradients
    row_peers             workers that need the same rows for one model
    wrapped_models        models in a `DistributedDataParallel`
    trained_tensors       the parameters and buffers that all workers have alike
    parameter_values      whether the workers still have the same values of these
    counted_gradients     gradients that count by a number which travels with them
    mark_format           the numbers by which workers see if they are alike
    gradient_plans        which gradients the workers send, and in which order
    gradient_parts        what happens to the gradient of one parameter on its way
    pack_memory           the memory in which small gradients travel together
    assigned_gradients    gradients that a step puts into `.grad` itself
    settings              the settings of optimizers, which have to be alike
    user_hooks            the user's hooks on parameters
    sent_gradients        how gradients are sent, in packs or alone, and weighed
    own_gradients         when they are sent: before, during and after backward
    lone_losses           what the loss of a lone replica was divided by
    own_random            the random numbers that the replica of a worker draws
    own_objects           the objects of the scope, and one run with them
"""
