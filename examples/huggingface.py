"""A Hugging Face model with graphex: a forward, `generate` with a static cache, and a training step."""

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

import graphex

torch.manual_seed(0)
shape = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(shape).eval()
prompt = torch.randint(1, 128, (1, 8))


def forward():
    """One forward without a cache: scoring, embedding, the prefill of a prompt."""
    with torch.no_grad():
        compiled = torch.compile(model, backend="graphex")
        torch.testing.assert_close(compiled(prompt, use_cache=False).logits, model(prompt, use_cache=False).logits)
        return graphex.explain(model, (prompt,), {"use_cache": False})


def generate():
    """`generate` compiles the decode step itself, given a static cache and a CompileConfig."""
    wanted = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    config = CompileConfig(backend="graphex", mode=None, options={"verify": True})
    config._compile_all_devices = True  # transformers compiles on GPUs only, unless it is told otherwise
    tokens = model.generate(prompt, **wanted, cache_implementation="static", compile_config=config)
    assert torch.equal(tokens, model.generate(prompt, **wanted))
    return graphex.journal(model.get_compiled_call(config))


def decode_step():
    """What `generate` compiled, looked at from all sides: one token, with the cache as an argument."""
    cache = StaticCache(config=shape, max_cache_len=32)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        return graphex.explain(model, (prompt[:, -1:],), {"past_key_values": cache})


def training():
    """With gradients enabled, the backward is compiled and compared too."""
    model.train()
    return graphex.explain(model, (), {"input_ids": prompt, "labels": prompt, "use_cache": False})


if __name__ == "__main__":
    journal = generate()
    (verdict,) = journal.verifications
    print(f"generate: {len(journal.graphs)} graph, {verdict.status} to the original\n")
    reports = {part.__name__: part() for part in (forward, decode_step, training)}
    for name, report in reports.items():
        print(f"{name}: largest difference from eager {report.worst_difference:.3g}")
        print(report.summary(), end="\n\n")
