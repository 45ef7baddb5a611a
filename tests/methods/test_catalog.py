from dataclasses import replace

import pytest
import torch
from onetrip.anatomy import UsageError
from onetrip.methods import METHODS, NAMES, Recipe, Setting, combine
from onetrip.methods.catalog import BASELINE, chosen, combined, find
from onetrip.methods.optimizers import OPTIMIZERS

CPU, CUDA = (Setting(torch.device(name), "float32") for name in ("cpu", "cuda"))


def applied(method, recipe, setting):
    return replace(recipe, **method.change(recipe, setting))


def assert_missing(name, setting, reason, batch_size=8):
    method = find(name, setting)
    said = method.missing(applied(method, Recipe(batch_size), setting), setting)
    assert reason in said and bool(said) == bool(reason)


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr("onetrip.methods.catalog.find_spec", lambda package: None)
    monkeypatch.setattr("onetrip.methods.catalog.shutil.which", lambda name: None)


@pytest.mark.parametrize("setting", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_changes_the_recipe_and_only_its_own_part(name, setting):
    recipe = Recipe(8)
    changed = METHODS[name].change(recipe, setting)
    assert applied(METHODS[name], recipe, setting) != recipe
    assert set(changed) <= {"batch_size", "accumulation"} or "batch_size" not in changed
    assert changed.get("optimizer", "adamw") in OPTIMIZERS


def test_what_guides_say_is_that_of_the_family():
    assert METHODS["bf16"].said == METHODS["tf32"].said == ("yes", "depends")
    assert METHODS["fused-kernels"].said == ("", "")


@pytest.mark.parametrize(("batch", "parts"), [(8, (2, 4)), (4, (1, 4)), (6, (3, 2)), (7, (1, 7)), (2, (1, 2))])
def test_accumulation_keeps_the_samples_of_a_step(batch, parts):
    recipe = applied(METHODS["accumulation"], Recipe(batch), CPU)
    assert (recipe.batch_size, recipe.accumulation) == parts
    assert recipe.samples_per_step == batch


def test_a_combination_applies_its_methods_in_order():
    method = combine(("batch-2x", "accumulation", "adamw8bit"))
    assert applied(method, Recipe(4), CPU) == Recipe(2, accumulation=4, optimizer="adamw8bit")
    assert method.own and not method.isolated
    assert combine(("compile", "sgd")).isolated and not combine(("compile", "sgd")).own


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("sgd", "adafactor"), "sgd and adafactor exclude each other (Optimizer choice)"),
        (("bf16", "bf16"), "bf16 and bf16 exclude each other (Mixed precision)"),
        (("bf16", "magic"), "unknown method 'magic'; there are batch-2x, "),
        (("bf16", ""), "unknown method ''"),
        (("bf16",), "at least two"),
    ],
)
def test_combinations_that_cannot_be(names, words):
    with pytest.raises(UsageError) as error:
        combine(names)
    assert words in str(error.value) and f"--combine {'+'.join(names)}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "setting", "reason"),
    [
        ("fp16", CPU, "needs a CUDA device"),
        ("bf16", replace(CPU, dtype="bfloat16"), "bfloat16 already"),
        ("fp16", replace(CUDA, dtype="bfloat16"), "bfloat16 already"),
        ("checkpointing", replace(CPU, can_checkpoint=False), "no gradient checkpointing"),
        ("zero-offload", CPU, "from a CUDA device"),
        ("tf32", CPU, "needs a CUDA device"),
        ("tf32", replace(CUDA, dtype="bfloat16"), "TF32 multiplies float32 matrices"),
        ("empty-cache", CPU, "keeps no cache of a CPU's memory"),
        ("empty-cache", CUDA, ""),
        ("flash-attention-2", replace(CPU, dtype="bfloat16"), "needs a CUDA device"),
        ("datasets-map", replace(CPU, reads_text=False), "needs a model of text"),
        ("datasets-stream+preloading", CPU, "streamed by one process"),
        ("fused-kernels", CPU, ""),
        ("linear-cross-entropy", CPU, ""),
        ("linear-cross-entropy", replace(CPU, has_token_loss=False), "no loss over a voc"),
        ("compile", CPU, "C++ compiler"),
        ("lora", CPU, "(pip install "),
        ("datasets-map", CPU, "(pip install "),
    ],
)
def test_what_is_missing_is_said(name, setting, reason, nothing_installed):
    assert_missing(name, setting, reason)


def test_a_batch_of_one_cannot_be_accumulated():
    assert_missing("accumulation", CPU, "at least 2", batch_size=1)


@pytest.mark.parametrize(
    ("name", "capability", "setting", "reason"),
    [
        ("tf32", (7, 0), CUDA, "compute capability 8.0 is the first"),
        ("tf32", (8, 0), CUDA, ""),
        ("flash-attention-2", (7, 5), replace(CUDA, dtype="bfloat16"), "from compute capability 8.0 on"),
        ("flash-attention-2", (9, 0), replace(CUDA, has_flash_attention=False), "no flash-attention 2 for this model"),
        ("flash-attention-2", (9, 0), CUDA, "--combine flash-attention-2+bf16"),
        ("flash-attention-2", (9, 0), replace(CUDA, dtype="bfloat16"), "pip install flash-attn"),
        ("flash-attention-2+fp16", (9, 0), CUDA, "pip install flash-attn"),
    ],
)
def test_what_is_missing_on_a_gpu_is_said(name, capability, setting, reason, nothing_installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert_missing(name, setting, reason)


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_combined_takes_the_precision_that_the_card_has(bf16, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
    assert set(combined("combined", CUDA).parts) == {"fused-kernels", "adamw8bit", "preloading", precision}
    memory = combined("combined-memory", CUDA)
    assert set(memory.parts) == {*combined("combined", CUDA).parts, "checkpointing", "accumulation"}


def test_combined_on_a_cpu():
    assert combined("combined", CPU).parts == ("fused-kernels", "adamw8bit")
    assert "checkpointing" not in combined("combined-memory", replace(CPU, can_checkpoint=False)).parts


def test_choosing():
    everything = [method.name for method in chosen((), ("sgd+bf16",), CPU)]
    assert everything == ["baseline", *NAMES, "sgd+bf16"]
    some = chosen(("combined", "sgd"), ("sgd+bf16", "sgd+bf16"), CPU)
    assert [method.name for method in some] == ["baseline", "sgd", "combined", "sgd+bf16"]
    assert some[0] is BASELINE


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"lr": 5e-4, "fused": None}),
        ("adamw-fused", {"lr": 5e-4, "fused": True}),
        ("adamw8bit", {"lr": 5e-4}),
        ("adafactor", {"lr": 5e-4, "scale_parameter": False, "relative_step": False}),
        ("sgd", {"lr": 5e-2, "momentum": 0.9}),
    ],
)
def test_optimizers_take_a_step(name, options):
    p = torch.nn.Parameter(torch.ones(64, 8))
    optimizer = OPTIMIZERS[name]([p])
    assert options.items() <= optimizer.defaults.items()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p < 1).all()
