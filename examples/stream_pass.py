"""Put a part of a model on a second stream, see the events that graphex adds, and try 30 orders that they allow."""

import torch

import graphex

aten, scope = torch.ops.aten, torch.ops.graphex


class Model(torch.nn.Module):
    def forward(self, x):
        mm = torch.mm(x, x)
        abs = torch.abs(mm)
        add = torch.add(abs, 1)
        sub = torch.sub(x, mm)
        return add, sub


def on_another_stream(gm, example_inputs, config):
    for node in list(gm.graph.nodes):
        if node.target is aten.mm.default:
            with gm.graph.inserting_before(node):
                gm.graph.call_function(scope.scope_enter.default, (["_user_stream_label"], ["stream_1"]))
        if node.target is aten.abs.default:
            with gm.graph.inserting_after(node):
                moment = gm.graph.call_function(scope.record.default)
            with gm.graph.inserting_after(moment):
                gm.graph.call_function(scope.scope_exit.default)
        if node.target is aten.sub.Tensor:
            with gm.graph.inserting_before(node):
                gm.graph.call_function(scope.wait.default, ([moment],))


finished = []  # the module given to the last custom pass: the later stages change it in place
options = {
    "post_grad_custom_pre_pass": on_another_stream,
    "post_grad_custom_post_pass": lambda gm, example_inputs, config: finished.append(gm),
}
model, x = Model(), torch.randn(3, 3)
compiled = torch.compile(model, backend="graphex", options=options)
print("equal:", all(map(torch.equal, compiled(x), model(x))))

(streams,) = graphex.journal(compiled).streams
for stream, nodes in streams.streams.items():
    print(f"{stream}: {', '.join(nodes)}")
print(f"events: {streams.users_events} of the pass, {streams.added_events} added")

tried = graphex.random_orders(finished[0], [x], orders=30)
print(f"{tried.tried} orders tried, {len(tried.differences)} wrong")
