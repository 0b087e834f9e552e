"""transformers models patched to compute their loss without logits, against the same models unpatched."""

import pytest
import torch
from plain import largest, relative

transformers = pytest.importorskip("transformers")
from lmhead.adapters import transformers as adapter  # noqa: E402

SMALL = dict(
    vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "llama tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)),
    "gemma2, softcap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, final_logit_softcapping=2.0, attn_implementation="eager")
    ),
    "granite, divided logits": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SMALL, logits_scaling=4.0)
    ),
    "cohere, scaled logits": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, logit_scale=0.25)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=131, n_embd=32, n_layer=1, n_head=4, n_positions=64, attn_pdrop=0.0,
                                embd_pdrop=0.0, resid_pdrop=0.0)
    ),  # fmt: skip
}


def make(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():  # heads at initialisation are almost flat
        model.get_output_embeddings().weight.mul_(20)
    ids = torch.randint(1, 131, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return model, ids, labels


def run(model, **inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name):
    model, ids, labels = make(name)
    want, want_grads = run(model, input_ids=ids, labels=labels)
    assert adapter.patch(model, return_entropy=True) is model
    got, got_grads = run(model, input_ids=ids, labels=labels)
    assert largest(got.loss, want.loss) <= 2e-5 and got.logits is None
    logp = torch.log_softmax(want.logits[:, :-1].float(), -1)
    picked = logp.gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    active = labels[:, 1:] != -100
    assert got.log_probs.shape == got.entropy.shape == (2, 8)
    assert largest(got.log_probs[active], picked[active]) <= 2e-5 and (got.log_probs[~active] == 0).all()
    assert largest(got.entropy[active], -(logp.exp() * logp).sum(-1)[active]) <= 2e-5
    assert got_grads.keys() == want_grads.keys()
    for key, grad in want_grads.items():
        assert relative(got_grads[key], grad) <= 1e-4, key
    adapter.unpatch(model)
    assert torch.equal(model(input_ids=ids, labels=labels).loss, want.loss)


def test_shift_labels_num_items_and_ignore_index():
    model, ids, labels = make("llama")
    shifted = torch.roll(labels, -1, 1)
    shifted[:, -1] = 5
    cases = (
        {"labels": labels, "num_items_in_batch": 7},
        {"labels": labels, "num_items_in_batch": torch.tensor(7)},
        {"labels": labels, "shift_labels": shifted},
        {"labels": labels.where(labels != -100, 3), "ignore_index": 3},
    )
    want = [model(input_ids=ids, **case).loss for case in cases]
    adapter.patch(model)
    got = [model(input_ids=ids, **case) for case in cases]
    for g, w in zip(got, want, strict=True):
        assert largest(g.loss, w) <= 2e-5
    assert got[2].log_probs.shape == (2, 9) and got[2].log_probs[0, -1] != 0


def test_without_labels_the_models_own_forward_runs():
    model, ids, _ = make("llama")
    want = model(input_ids=ids).logits
    generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    adapter.patch(model)
    assert torch.equal(model(input_ids=ids).logits, want)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), generated)


def test_a_batch_without_labels_costs_nothing_and_is_no_nan():
    model, ids, labels = make("llama")
    adapter.patch(model)
    output, grads = run(model, input_ids=ids, labels=torch.full_like(labels, -100))
    assert output.loss.item() == 0 and all((g == 0).all() for g in grads.values())


def test_tuples_and_temperature():
    model, ids, labels = make("llama")
    plain = model(input_ids=ids, labels=labels).logits[:, :-1].detach()
    adapter.patch(model, temperature=0.5, return_entropy=True, entropy_requires_grad=True)
    loss, log_probs, entropy = model(input_ids=ids, labels=labels, return_dict=False, use_cache=False)
    logp = torch.log_softmax(plain / 0.5, -1).gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    active = labels[:, 1:] != -100
    assert largest(log_probs[active], logp[active]) <= 2e-5 and entropy.requires_grad
    assert largest(loss, -logp[active].mean()) <= 2e-5


def test_heads_that_are_something_else_are_refused():
    model, ids, labels = make("granite, divided logits")
    with pytest.raises(NotImplementedError, match="expected logits = head"):
        adapter.patch(model, logit_scale=1.0)
    adapter.patch(model, logit_scale=1.0, verify=False)
    with pytest.raises(ValueError, match="patched already"):
        adapter.patch(model)
    model, ids, labels = make("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(NotImplementedError, match="expected torch.nn.Linear as its head, got Sequential"):
        adapter.patch(model)
    model, ids, labels = make("llama")
    model.loss_function = lambda *a, **k: None
    with pytest.raises(NotImplementedError, match="ForCausalLMLoss"):
        adapter.patch(model)
    model, ids, labels = make("llama")
    adapter.patch(model)
    with pytest.raises(NotImplementedError, match="output_router_logits"):
        model(input_ids=ids, labels=labels, output_router_logits=True)
    with pytest.raises(NotImplementedError, match="logits_to_keep"):
        model(input_ids=ids, labels=labels, logits_to_keep=1)
