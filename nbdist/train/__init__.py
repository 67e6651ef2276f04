"""What training code on a rank calls. Independent of notebooks, sessions or the wire: it works under torchrun too.

All of it is had as `nbdist.prepare`, `nbdist.accumulate`, ...; names and meanings are Accelerate's where it has them.
`state` is what one process knows of its training; everything else works on it. A room imports only those below it.

    estimate    what a plan would need               tracking     where numbers go
    prepare     objects become what the plan says
    data        loaders      checkpoint  saved and loaded        compare      whether ranks agree
    loop        backward, windows of micro-batches, optimizers, precision
    structure   blocks, shards, what is on the meta device
    collective  gather, reduce, meet; who does what, and when
"""
