"""The TFDS builder that writes a task's examples to disk. Imported lazily: tensorflow_datasets takes seconds."""

from collections.abc import Iterator, Mapping, Sequence

import tensorflow_datasets as tfds

from estr_jax.tasks.task import Example


class Prompts(tfds.core.GeneratorBasedBuilder):
  """Questions and answers of one task in array_record files, which are read by index and without TensorFlow."""

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, examples: Mapping[str, Sequence[Example]], data_dir: str):
    """`examples` by split; `data_dir` belongs to this task and to these examples alone."""
    self._examples = examples
    super().__init__(data_dir=data_dir)

  def _info(self) -> tfds.core.DatasetInfo:
    return self.dataset_info_from_configs(
      description="Questions and answers of one task.",
      features=tfds.features.FeaturesDict({"question": tfds.features.Text(), "answer": tfds.features.Text()}),
      disable_shuffling=True,  # record i is example i
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[tuple[int, Example]]]:
    return {split: self._generate_examples(examples) for split, examples in self._examples.items()}

  def _generate_examples(self, examples: Sequence[Example]) -> Iterator[tuple[int, Example]]:
    yield from enumerate(dict(example) for example in examples)

  # TFDS prints to stdout, in bold, whatever its logging is set to; that would tear a live terminal view.
  def _log_download_bytes(self) -> None: ...

  def _log_download_done(self) -> None: ...


def write(examples: Mapping[str, Sequence[Example]], data_dir: str) -> None:
  """Prepares the files in `data_dir`, silently and without touching the network."""
  tfds.disable_progress_bar()
  builder = Prompts(examples=examples, data_dir=data_dir)
  builder.download_and_prepare(
    file_format="array_record",
    download_config=tfds.download.DownloadConfig(
      try_download_gcs=False, compute_stats=tfds.download.ComputeStatsMode.SKIP
    ),
  )


def source(examples: Mapping[str, Sequence[Example]], data_dir: str, split: str) -> Sequence[Mapping[str, bytes]]:
  """Random access to a split that `write` prepared."""
  return Prompts(examples=examples, data_dir=data_dir).as_data_source(split)
