"""Programs around compiled graphs: they call a graph again and again, or ahead of time.

    warm_up      captures the device graphs of example calls before the calls that matter
    replayer     one captured call, repeated without Dynamo and AOTAutograd around it
    train_step   a training step as one device graph, optimizer included

The first two run calls while their thread warms up (`runtime.program.warming_up`). `train_step` captures what is around
compiled graphs, which are not captured themselves (`captures_held_back`); read `step_program` first.
"""
