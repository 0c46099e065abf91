"""Programs around compiled graphs: they call a graph again and again, or ahead of time.

    warm_up      captures the device graphs of example calls before the calls that matter
    replayer     one captured call, repeated without Dynamo and AOTAutograd around it

Both run calls while their thread warms up (`runtime.program.warming_up`).
"""
