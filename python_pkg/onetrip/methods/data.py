"""Something to learn that every machine has: the prose of Python's own language reference, or coloured noise as images.

Words become token ids by hashing them into the model's vocabulary, or by its tokenizer where it came with one. A sample
is a function of the seed and its number alone, so that every method sees the same, whoever loads it.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..anatomy.models import IGNORED_LABEL, MASKED_FRACTION, PRESETS, first_word_id, image_shape, reads_images
from .catalog import Recipe

Sample = dict[str, Any]
Batch = dict[str, Tensor]

_SAMPLE_SEED_STRIDE = 1_000_003  # seeds of two runs share no samples' seeds until a million samples
_HELD_OUT_IMAGES_START = 1 << 30


def prose() -> list[str]:
    """Paragraphs of running text out of pydoc_data.topics, without headings, code, grammar and tables."""
    from pydoc_data.topics import topics

    paragraphs = []
    for topic in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[topic]):
            text = " ".join(block.split())
            if re.match(r"[A-Z]", block) and re.search(r"[.:!?]$", text) and len(text.split()) >= 8:
                paragraphs.append(text)
    return list(dict.fromkeys(paragraphs))


def hashed_ids(text: str, vocab_size: int) -> Tensor:
    """One id a word or punctuation mark, the same on every machine; different words may share one."""
    first = first_word_id(vocab_size)
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return torch.tensor([first + zlib.crc32(word.encode()) % (vocab_size - first) for word in words])


class TokenRows(Dataset[Sample]):
    """Rows of a token stream, over and over: sample i is row i modulo their number."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> Sample:
        return {"index": index, "input_ids": self.rows[index % len(self.rows)]}


class StoredRows(Dataset[Sample]):
    """The same samples from a file, which the datasets library maps into memory."""

    def __init__(self, rows: Tensor) -> None:
        from datasets import Dataset as Table
        from datasets import disable_progress_bars

        disable_progress_bars()  # the command shows its own
        self._folder = tempfile.TemporaryDirectory(prefix="onetrip-methods-")  # removed with this object
        path = f"{self._folder.name}/rows.parquet"
        Table.from_dict({"input_ids": rows.numpy()}).to_parquet(path)
        self.rows = self._opened(path)

    def _opened(self, path: str) -> Any:
        from datasets import Dataset as Table

        return Table.from_parquet(path, cache_dir=self._folder.name).with_format("torch")

    def __getitem__(self, index: int) -> Sample:
        return {"index": index, **self.rows[index % len(self.rows)]}


class StreamedRows(StoredRows, IterableDataset[Sample]):
    """The same samples in their order, read from a file as they are asked for."""

    def _opened(self, path: str) -> Any:
        from datasets import load_dataset

        return load_dataset("parquet", data_files=path, split="train", streaming=True).with_format("torch")

    def __iter__(self) -> Iterator[Sample]:
        rows = itertools.chain.from_iterable(itertools.repeat(self.rows))
        return ({"index": index, **row} for index, row in enumerate(rows))


class Images(Dataset[Sample]):
    """Noise with a colour of its label's, as bytes [channels, height, width]."""

    def __init__(self, config: Any, seed: int, start: int = 0) -> None:
        self.shape = image_shape(config)
        self.n_labels: int = config.num_labels
        self.seed, self.start = seed, start

    def __getitem__(self, index: int) -> Sample:
        generator = _generator(self.seed, self.start + index)
        label = int(torch.randint(self.n_labels, (1,), generator=generator))
        colours = torch.randint(0, 64, (self.n_labels, self.shape[0]), generator=_generator(self.seed, 0))
        noise = torch.randint(0, 192, self.shape, generator=generator)
        return {"image": (noise + colours[label].view(-1, 1, 1)).to(torch.uint8), "label": label}


def _generator(seed: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * _SAMPLE_SEED_STRIDE + index)


@dataclass(frozen=True)
class MaskWords:
    """Collates rows for a masked language model: of 15% of the words 80% become the mask, 10% random, 10% stay."""

    mask_id: int
    vocab_size: int
    seed: int
    whole_label: bool = False
    """Whether every position is to be predicted: an encoder-decoder writes the whole row again."""

    def __call__(self, samples: list[Sample]) -> Batch:
        inputs, labels = zip(*(self._masked(sample) for sample in samples), strict=True)
        return {"input_ids": torch.stack(inputs), "labels": torch.stack(labels)}

    def _masked(self, sample: Sample) -> tuple[Tensor, Tensor]:
        row, generator = sample["input_ids"], _generator(self.seed, sample["index"])
        masked = torch.rand(row.shape, generator=generator) < MASKED_FRACTION
        masked[0] |= ~masked.any()  # a row without a label has no loss
        fate = torch.rand(row.shape, generator=generator)
        first = first_word_id(self.vocab_size)
        random_words = torch.randint(first, self.vocab_size, row.shape, generator=generator)
        seen = torch.where(masked & (fate < 0.8), self.mask_id, row)
        seen = torch.where(masked & (fate >= 0.9), random_words, seen)
        return seen, row if self.whole_label else torch.where(masked, row, IGNORED_LABEL)


def collate_rows(samples: list[Sample]) -> Batch:
    """For a causal language model: the row is its own label."""
    rows = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": rows, "labels": rows.clone()}


def collate_images(samples: list[Sample]) -> Batch:
    """Bytes to floats around 0, as an image processor does."""
    pixels = torch.stack([sample["image"] for sample in samples]).to(torch.float32)
    return {"pixel_values": pixels / 127.5 - 1.0, "labels": torch.tensor([sample["label"] for sample in samples])}


@dataclass(frozen=True)
class Data:
    """What there is to train on and to be judged by."""

    training: Dataset[Sample]
    held_out: Dataset[Sample]
    collate: Callable[[list[Sample]], Batch]
    tokens: str
    """How the text became ids: "tokenizer", "hashed words", or "images"."""
    n_held_out: int

    def batches(self, recipe: Recipe) -> Iterator[Batch]:
        """The samples in their order, for ever. With workers they are prepared ahead, in processes of their own."""
        more: dict[str, Any] = {"num_workers": recipe.workers, "pin_memory": recipe.pin_memory}
        if recipe.workers:
            more |= {"persistent_workers": True, "prefetch_factor": 4}
        n, training = recipe.batch_size, self.training
        if recipe.source:
            assert isinstance(training, TokenRows)
            if recipe.source == "datasets-stream":
                return iter(DataLoader(StreamedRows(training.rows), batch_size=n, collate_fn=self.collate, **more))
            training = StoredRows(training.rows)
        # A batch of 8 holds what two batches of 4 hold.
        sampler: Any = (list(range(start, start + n)) for start in itertools.count(0, n))
        return iter(DataLoader(training, batch_sampler=sampler, collate_fn=self.collate, **more))

    def held_out_batches(self, batch_size: int) -> Iterator[Batch]:
        for start in range(0, self.n_held_out, batch_size):
            stop = min(start + batch_size, self.n_held_out)
            yield self.collate([self.held_out[index] for index in range(start, stop)])


def _tokenizer(name: str) -> Any:
    """The tokenizer that came with a folder or a hub model; None without one."""
    if name in PRESETS:
        return None
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception:  # what a folder without one raises differs between releases
        return None


def split_rows(stream: Tensor, length: int, n_held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """(Rows to train on, rows held out) that share no word of the text.

    At most half of the rows are held out. A text too short for a row of each is halved, and each half repeated to fill
    a row of its own.
    """
    if len(stream) < 2 * length:
        halves = stream.tensor_split(2)
        training, held_out = (half.repeat(-(-length // len(half)))[:length].view(1, length) for half in halves)
        return training, held_out
    rows = stream[: len(stream) // length * length].view(-1, length)
    rows = rows[torch.randperm(len(rows), generator=_generator(seed, 0))]
    n_held_out = min(n_held_out, len(rows) // 2)
    return rows[n_held_out:], rows[:n_held_out]


def make_data(name: str, model: nn.Module, sequence_length: int, n_held_out: int, seed: int) -> Data:
    """Data for the head that the model has. name: as given to load_model; a folder may hold a tokenizer.

    n_held_out: of long rows the text has fewer, and no more than half of them are held out.
    """
    config: Any = model.config
    if reads_images(model):
        held_out_images = Images(config, seed, _HELD_OUT_IMAGES_START)
        return Data(Images(config, seed), held_out_images, collate_images, "images", n_held_out)
    config, tokenizer = config.get_text_config(), _tokenizer(name)
    paragraphs = prose()
    mask_id = first_word_id(config.vocab_size) - 1
    if tokenizer is None:
        stream, tokens = hashed_ids("\n".join(paragraphs), config.vocab_size), "hashed words"
    else:
        ids = tokenizer(paragraphs, add_special_tokens=False, verbose=False)["input_ids"]
        stream, tokens = torch.tensor([token for paragraph in ids for token in paragraph]), "tokenizer"
        mask_id = mask_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    training, held_out = split_rows(stream, sequence_length, n_held_out, seed)
    masked_lm = type(model).__name__.endswith("ForMaskedLM")
    collate: Callable[[list[Sample]], Batch] = collate_rows
    if masked_lm or getattr(config, "is_encoder_decoder", False):
        collate = MaskWords(mask_id, config.vocab_size, seed, whole_label=not masked_lm)
    return Data(TokenRows(training), TokenRows(held_out), collate, tokens, len(held_out))
