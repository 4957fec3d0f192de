"""What lints know of a program before they judge it.

That is of its tensors, modules, losses, rows and steps.

It answers: which tensors, modules, losses and rows are there, where did the program
make them, and what has a rank done since its last step? Nothing here names a mistake.

    asking        questions to objects of the program, which may refuse to be asked
    nodes         nodes of autograd's graphs
    operators     operators by what they do to what they write on
    objects       what is known of objects of the program while they are there
    constants     the whole numbers that a function of the program knows
    known         what is known of tensors while their memory is there
    places        lines of the program, and comments there that silence a lint
    fingerprints  what is kept of a tensor
    contents      what a data set holds
    losses        of what a loss is made
    modules       the modules that there are, and what they have
    facts         what each rank has done since its last step
    copies        copies of tensors that ranks have to keep alike
    pieces        memory of which a fact is known, and what is computed from it
    tracks        parameters at the same position of an optimizer in several ranks
    own_steps     steps that a program makes itself, without an optimizer of torch
"""
