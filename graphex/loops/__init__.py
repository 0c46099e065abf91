"""Programs around compiled graphs: they call a graph again and again, or ahead of time.

    saved        a compiled model as one file, called by another process without Dynamo
    replayer     `warm_up` captures example calls before the calls that matter; a replayer repeats one without Dynamo
    decode_loop  a step on fixed memory, captured once, launched ahead and read back without a wait
    generate     a model of transformers in such a loop; `generation` says what it took
    train_step   a training step as one device graph, optimizer included

`warm_up` and `replayer` run calls while their thread warms up (`runtime.program.warming_up`). `generate` is made of
`session` (what a call asks for; memory, compiled step, captures), `loop_cache` and `processors`. `train_step` captures
what is around compiled graphs, which are not captured themselves (`captures_held_back`). `step_program` watches a step
(`observation`), prepares its state (`step_state`), captures it and looks in every call whether what the code reaches is
the same: read that first.
"""
