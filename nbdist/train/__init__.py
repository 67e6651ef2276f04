"""What training code on a rank calls. Knows nothing of notebooks, sessions or the wire: it works under torchrun too.

All of it is had as `nbdist.prepare`, `nbdist.accumulate`, ...; names and meanings are Accelerate's where it has them.

    state          what one process knows of its training; everything else works on it
    prepare        models, optimizers, loaders and schedulers become what the plan says
      strategies     DDP, FSDP2, HSDP by torch's own parts       blocks, caches, materialize   what they are applied to
      precision, float8   autocast, scaler, fp8                  stepping, shadow, schedules   optimizers and schedulers
      environment    seeds, determinism, TF32, NUMA, gc          local_sgd              averages instead of gradients
    loop           accumulate, backward, unwrap                  gradients              means over windows, clipping
      unexchanged    what FSDP2 has gathered, to be dropped with its window
    collectives    gather, reduce, broadcast, pad                turns                  who does what, and when
    data           loaders that give each rank its share         memory                 batches that fit
    checkpoint     the whole training, saved and loaded          model_files            models as safetensors
    weights        what a model begins with, and whether it fits   weight_sources       where that comes from
    trackers       where numbers go                              estimate               what a step needs
    replicas       whether ranks agree, and how they come to
"""
