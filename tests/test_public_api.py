"""What importing costs, and the names and signatures that users rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys

import onetrip
import pytest
from onetrip import nn, ops, optim

IMPORT = """
import sys, torch
modules = set(sys.modules)
before = {name: (id(value), {k: id(v) for k, v in vars(value).items()})
          for module in (torch.nn, torch.nn.functional, torch.optim)
          for name, value in vars(module).items() if isinstance(value, type)}
functions = {name: id(value) for name, value in vars(torch.nn.functional).items()}
state, threads, dtype = torch.random.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
import onetrip
print(sorted({"onetrip.nn", "onetrip.optim", "onetrip.patching", "onetrip.kernels"} & set(sys.modules)))
from onetrip import *  # all of it, at its first use
for module in (torch.nn, torch.nn.functional, torch.optim):
    for name, value in vars(module).items():
        if isinstance(value, type):
            assert before[name] == (id(value), {k: id(v) for k, v in vars(value).items()}), name
assert functions == {name: id(value) for name, value in vars(torch.nn.functional).items()}
assert torch.equal(state, torch.random.get_rng_state()) and threads == torch.get_num_threads()
assert dtype == torch.get_default_dtype() and not torch.cuda.is_initialized()
import onetrip.integrations
assert not hasattr(onetrip.integrations, "unknown")
assert set(onetrip.integrations.__all__) <= set(dir(onetrip.integrations))
print(sorted({name.partition(".")[0] for name in set(sys.modules) - modules} & LARGE))
print("onetrip.kernels" in sys.modules)
"""
LARGE = {
    *("triton", "jinja2", "rich", "typer", "matplotlib"),
    *("transformers", "kernels", "axolotl", "llamafactory", "pydantic"),
}
"""What torch itself does not load of these, onetrip does not either: not until it is used."""


@pytest.mark.promise("I10")
def test_importing_has_no_side_effects_and_loads_nothing_large():
    code = f"LARGE = {LARGE}\n{IMPORT}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]", "False"]


SIGNATURES = {
    ops.layer_norm: "(x, weight=None, bias=None, eps=1e-05, *, out_dtype=None, **unknown)",
    ops.rms_norm: (
        "(x, weight=None, eps=1e-06, *, weight_offset=0.0, cast_before_weight=False, out_dtype=None, **unknown)"
    ),
    ops.bias_dropout_residual: "(x, residual, bias=None, *, dropout_p=0.0, rng=None, **unknown)",
    ops.bias_dropout_residual_norm: (
        "(x, residual, weight=None, norm_bias=None, *, bias=None, dropout_p=0.0, norm='layer', eps=1e-05, "
        "weight_offset=0.0, cast_before_weight=False, return_residual=False, rng=None, **unknown)"
    ),
    ops.glu: ("(gate, up, activation='silu', *, limit=None, alpha=1.0, up_offset=0.0, dropout_p=0.0, rng=None)"),
    ops.glu_packed: (
        "(gate_up, activation='silu', *, gate_first=True, interleaved=False, limit=None, alpha=1.0, up_offset=0.0, "
        "dropout_p=0.0, rng=None)"
    ),
    ops.bias_activation: "(x, bias, activation, *, dropout_p=0.0, rng=None)",
    ops.softcap: "(x, cap)",
    ops.rotary_embedding: "(q, k, cos, sin, *, interleaved=False, out_dtype=None)",
    ops.moe_combine: "(y, places, weights=None, *, dtype=None)",
    ops.moe_dispatch: "(x, places)",
    ops.dropout_keep_mask: "(shape, dropout_p, rng, device='cpu')",
    optim.AdamW8bit: (
        "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, *, optim_bits=8, min_8bit_numel=4096, "
        "maximize=False, capturable=False, master_weight_bits=None, bf16_stochastic_round=False, max_grad_norm=None, "
        "**unknown)"
    ),
    optim.Adam8bit: (
        "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, *, optim_bits=8, min_8bit_numel=4096, "
        "maximize=False, capturable=False, master_weight_bits=None, bf16_stochastic_round=False, max_grad_norm=None, "
        "**unknown)"
    ),
    optim.AdamW8bit.dequantized_state: "(self, p)",
    optim.AdamW8bit.master_weights: "(self, model)",
    optim.AdamW8bit.load_bitsandbytes_state_dict: "(self, state)",
    optim.AdamW8bit.state_dict_for_torch: "(self)",
    optim.trainer_optimizer: "(training_args, *, model=None, embeddings_32bit=False, **overrides)",
    onetrip.available_backends: "(device='cpu')",
    onetrip.use_backend: "(name)",
    onetrip.set_backend: "(name)",
}


@pytest.mark.parametrize(
    ("function", "signature"), SIGNATURES.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_public_signatures(function, signature):
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()
    ]
    assert str(inspect.Signature(parameters)) == signature
    assert function.__doc__ and inspect.signature(function).return_annotation is not inspect.Parameter.empty


def test_public_names():
    public = {name for module in (onetrip, ops, nn, optim) for name in module.__all__}
    assert {function.__name__ for function in SIGNATURES if "." not in function.__qualname__} <= public
    assert {"LayerNorm", "RMSNorm", "BiasDropoutResidual", "BiasDropoutResidualNorm", "ops", "nn", "optim"} <= public
    for module in (onetrip, ops, nn, optim):
        for name in module.__all__:
            assert hasattr(module, name)
            assert name == "__version__" or not name.startswith("_")
