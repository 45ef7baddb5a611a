"""Patched models of the zoo compute what they computed: tiny random-weight configurations on the CPU."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from onetrip.patching import PatchReport, patch_model, unpatch_model
from outcomes import Outcome, assert_agree, assert_equal, loss_outcome, outcome
from patching_cases import ZOO, build, causal, padded_text, token_ids
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

transformers = pytest.importorskip("transformers")

BERT_LIKE = {"layer_norm": 1, "add_norm": 1, "dropout_add_norm": 4, "shared_input": 2, "bias_activation": 3}
LLAMA_LIKE = {"add_norm": 2, "rotary": 2, "gated_mlp": 2}
SITES: dict[str, dict[str, int]] = {
    **dict.fromkeys(("bert", "roberta", "electra"), BERT_LIKE),
    "distilbert": {"layer_norm": 1, "add_norm": 3, "shared_input": 2, "bias_activation": 2},
    "gpt2": {"layer_norm": 5, "add_norm": 2, "key_value_cache": 2, "bias_activation": 2},
    "vit": {"layer_norm": 3, "dropout_add_norm": 2, "bias_activation": 2, "shared_input": 2},
    "t5": {"rms_norm": 12, "dropout_add": 10, "cast_input": 4, "shared_input": 6},
    **dict.fromkeys(("llama", "gemma", "mixtral"), LLAMA_LIKE | {"rms_norm": 3}),
    **dict.fromkeys(("olmo", "cohere"), LLAMA_LIKE | {"layer_norm": 3}),
    "olmo2": LLAMA_LIKE | {"rms_norm": 9},
    "gemma2": {"rms_norm": 7, "add_norm": 2, "attention_softmax": 2, "gated_mlp": 2},
    "gemma3": LLAMA_LIKE | {"rms_norm": 11},
    "albert": {"layer_norm": 1, "dropout_add_norm": 1, "add_norm": 2, "bias_activation": 1},
    "modernbert": {"layer_norm": 4, "add_norm": 2, "attention_softmax": 2, "gated_mlp": 2},
    "bart": {"add_norm": 2, "dropout_add_norm": 4, "shared_input": 6},
    "esm": {"layer_norm": 6, "dropout_add": 4, "rotary": 2, "bias_activation": 3},
    "xlnet": {"layer_norm": 2, "dropout_add_norm": 2},
    "mpt": {"layer_norm": 3, "dropout_add_norm": 2, "dropout_add": 2, "attention_softmax": 2},
}
"""Of each pattern."""


def assert_sites(report: PatchReport, name: str) -> None:
    """Those of SITES since transformers 5, and a model with its output layer where it has a loss over the vocabulary.
    Version 4 writes some models otherwise: something is patched there."""
    found = dict(Counter(site.pattern for site in report.patched))
    expected = SITES[name] | ({} if name == "vit" else {"cross_entropy": 2})
    assert not {site.name for site in report.skipped} & {"lm_head"}  # whose activation is a site
    assert found == expected if int(transformers.__version__.split(".")[0]) >= 5 else found


@pytest.mark.parametrize("name", SITES)
def test_training_and_evaluation_match_the_unpatched_model(name: str) -> None:
    model, inputs = build(name), ZOO[name].inputs()
    with torch.no_grad():
        evaluated = model.eval()(**inputs).logits
    expected = loss_outcome(model.train(), inputs)
    report = patch_model(model)
    with torch.no_grad():
        assert_agree([model.eval()(**inputs).logits], [evaluated])
    model.train()
    assert_sites(report, name)
    for _ in range(3):  # the first links sums to norms, the second uses the links
        assert_agree(loss_outcome(model, inputs), expected)
    calls = report.calls()
    assert all(fallen_back == 0 for _, fallen_back in calls.values()), report
    # Without dropout a sum alone is torch's. OLMo 2's norms stand before its sums. GPT-2 has no mask here. T5 casts
    # nothing without autocast.
    alone = ("dropout_add", "attention_mask", "cast_input", *["add_norm"] * (name == "olmo2"))
    assert all(calls[site.name][0] > 0 for site in report.patched if site.pattern not in alone), report
    unpatch_model(model)
    assert_equal(loss_outcome(model, inputs), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bfloat16") for name in ("bert", "t5", "llama", "gemma", "olmo2", "cohere", "gpt2")]
    + [("bert", "float16"), ("llama", "float16")],
)
def test_half_precision_is_as_accurate_as_the_unpatched_model(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors against the same weights in float64, loss, logits and gradients: at most twice the unpatched model's."""
    # What takes SDPA's place on some CPUs has this test with larger scores: attention/test_sdpa.py.
    monkeypatch.setattr("onetrip.patching.attention.interface.multiplies_bfloat16_in_vectors", lambda: False)
    model, inputs = build(name).to(getattr(torch, dtype)).train(), ZOO[name].inputs()
    truth = loss_outcome(copy.deepcopy(model).double(), inputs)
    expected = loss_outcome(model, inputs)
    report = patch_model(model)
    assert_sites(report, name)
    loss_outcome(model, inputs)
    actual = loss_outcome(model, inputs)
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype, key
        error = (actual[key].double() - truth[key]).norm()
        unpatched_error = (tensor.double() - truth[key]).norm()
        assert error <= 2 * unpatched_error + 1e-3 * truth[key].norm(), key


@pytest.mark.parametrize("name", ["bert", "t5", "llama", "gemma", "olmo2", "gpt2"])
def test_autocast_keeps_every_dtype(name: str) -> None:
    """The dtype of what each module returns, under CPU autocast to bfloat16, and the outputs themselves."""
    model, inputs = build(name).eval(), ZOO[name].inputs()

    def dtypes_and_logits() -> tuple[list[tuple[str, torch.dtype | None]], Tensor]:
        seen: list[tuple[str, torch.dtype | None]] = []
        names = {module: name for name, module in model.named_modules()}
        inside = {child for module in model.modules() if is_block(module) for child in module.children()}
        handles = [
            module.register_forward_hook(lambda m, _, y: seen.append((names[m], getattr(y, "dtype", None))))
            for module in model.modules()
            if (is_block(module) or not list(module.children())) and module not in inside
        ]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs).logits
        for handle in handles:
            handle.remove()
        return seen, logits

    def is_block(module: nn.Module) -> bool:
        ends = ("Output", "LayerFF", "DecoderLayer", "Block", "MLP", "Intermediate", "Transform", "Embeddings")
        return type(module).__name__.endswith(ends)

    expected_dtypes, expected = dtypes_and_logits()
    report = patch_model(model)
    actual_dtypes, actual = dtypes_and_logits()
    assert actual_dtypes == expected_dtypes
    assert all(fallen_back == 0 for _, fallen_back in report.calls().values())
    assert_agree([actual], [expected], relative=5e-2)


@pytest.mark.parametrize(
    ("name", "more"),
    [("gpt2", {}), ("gpt2", {"num_beams": 2}), ("llama", {}), ("llama", {"use_cache": False}), ("t5", {})],
)
def test_generate_gives_the_same_tokens(name: str, more: dict[str, Any]) -> None:
    """With links that training has made."""
    model = build(name).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
    expected = model.generate(token_ids(), **options)
    patch_model(model)
    loss_outcome(model.train(), ZOO[name].inputs())
    assert torch.equal(model.eval().generate(token_ids(), **options), expected)


DROPOUT: dict[str, tuple[str, ...]] = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "t5": ("dropout_rate",),
    "llama": ("attention_dropout",),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", DROPOUT)
def test_gradient_checkpointing_draws_the_same_masks(name: str, use_reentrant: bool, autocast: bool) -> None:
    """A reentrant checkpoint runs forward without gradients first: what depends on them must not choose who draws."""
    if use_reentrant and autocast and torch.__version__ < (2, 10):
        pytest.skip("reentrant checkpoints under autocast have wrong gradients up to torch 2.9, unpatched, too")
    model, inputs = build(name, **dict.fromkeys(DROPOUT[name], 0.3)).train(), ZOO[name].inputs()
    patch_model(model)
    read: dict[str, list[Tensor]] = {}
    for path, module in model.named_modules():
        if path.endswith((".output.dense", ".c_proj", ".o", ".wo", ".o_proj", ".down_proj")):
            module.register_forward_pre_hook(lambda _, given, path=path: read.setdefault(path, []).append(given[0]))

    def run(seed: int) -> Outcome:
        read.clear()
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_outcome(model, inputs)

    run(7)  # makes the links
    expected, once = run(7), dict(read)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    # Gradients that autocast rounds are added up in another order.
    assert_agree(run(7), expected, relative=0.02 if autocast else 1e-5)
    assert read.keys() == once.keys() and all(len(each) == 2 for each in read.values())
    assert all(torch.equal(x, once[path][0]) for path, both in read.items() for x in both)
    assert not torch.equal(run(8)["loss"], expected["loss"])


@pytest.mark.parametrize("patterns", [None, ["linear_cross_entropy"]], ids=["default", "linear_cross_entropy"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_lora_of_every_linear_layer(name: str, order: str, patterns: list[str] | None) -> None:
    """Adapters beside the linear layers whose products are fused, llama's output layer too: nothing is skipped or added
    twice."""
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        target = r".*(_proj|lm_head)" if name == "llama" else "all-linear"
        config = peft.LoraConfig(target_modules=target, r=2, init_lora_weights=False)
        return peft.get_peft_model(model, config)

    inputs = ZOO[name].inputs()
    expected = loss_outcome(adapted(build(name)).train(), inputs)
    model = build(name)
    if order == "before":
        patch_model(model, patterns=patterns)
    model = adapted(model).train()
    if order == "after":
        patch_model(model, patterns=patterns)
    assert_agree(loss_outcome(model, inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "has_head"), [("bert", True), ("llama", True), ("bert", False), ("electra", False), ("gpt2", False)]
)
def test_compiles_without_graph_breaks(name: str, has_head: bool) -> None:
    """Without a head a model's own forward changes dictionaries while it is compiled."""
    model, inputs = build(name, use_cache=False).train(), ZOO[name].inputs()
    model, inputs = (model, inputs) if has_head else (model.base_model, {"input_ids": inputs["input_ids"]})
    expected = outcome(model, **inputs)
    patch_model(model)
    torch.compiler.reset()
    assert_agree(outcome(torch.compile(model, fullgraph=True, backend="aot_eager"), **inputs), expected)


@pytest.mark.parametrize("attention", [None, True])
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_a_training_step_on_the_meta_device(name: str, attention: bool | None) -> None:
    """Where torch has no autocast; such steps count operators and memory."""
    model = build(name).to("meta").train()
    patch_model(model, attention=attention)
    inputs = {key: x.to("meta") for key, x in causal().items()}
    for _ in range(2):  # the first links sums to norms
        model(**inputs).loss.backward()
    assert sum(p.grad is not None for p in model.parameters()) > 20


def test_fake_tensors_cannot_be_patched_but_patched_models_take_them() -> None:
    model = build("llama")
    with FakeTensorMode(), pytest.raises(RuntimeError, match="must be called outside of FakeTensorMode"):
        patch_model(model)
    assert patch_model(model).patched
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(**causal()).loss.shape == ()


@pytest.mark.promise("jit")
@pytest.mark.filterwarnings("ignore")  # of the tracer: what Python looks at is a constant of the graph
@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
def test_torch_jit_traces_it(requires_grad: bool) -> None:
    model, inputs = build("bert").requires_grad_(requires_grad), (token_ids(), padded_text()["attention_mask"])
    patch_model(model)
    traced = torch.jit.trace(model, inputs, strict=False)
    torch.testing.assert_close(
        traced(token_ids(seed=2), inputs[1])["logits"], model(token_ids(seed=2), inputs[1]).logits
    )


REMOTE_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class TinyConfig(PretrainedConfig):
    model_type = "tiny-remote"

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(16))

    def forward(self, h):
        return self.gain * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))

class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.proj, self.drop, self.post = nn.Linear(16, 16), nn.Dropout(0.1), Scale()
        self.post_init()

    def forward(self, x):
        return self.post(x + self.drop(self.proj(x)))
"""


def test_remote_code_models_are_patched(tmp_path: Any) -> None:
    """The classes of a model loaded from its own files have no known names; what they compute is recognised."""
    (tmp_path / "modeling_tiny.py").write_text(REMOTE_CODE)
    (tmp_path / "config.json").write_text(
        '{"model_type": "tiny-remote", "auto_map": {"AutoConfig": "modeling_tiny.TinyConfig", '
        '"AutoModel": "modeling_tiny.TinyModel"}}'
    )
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    model = transformers.AutoModel.from_config(config, trust_remote_code=True).eval()
    x = torch.randn(2, 3, 16)
    expected = model(x)
    report = patch_model(model)
    assert [(site.name, site.pattern) for site in report.patched] == [("", "dropout_add_norm")]
    torch.testing.assert_close(model(x), expected)
