"""Raw text to PREFIX.bin/.idx and its manifest PREFIX.json: what tools/preprocess_data.py does, as a function.

The input is cut into parts (raw_parts.py). Workers turn parts into files in PREFIX.parts/, this process strings them together in
order as they come in and renames the result at the end. Whatever is finished when a run dies is used by the next one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.data.indexed import IndexedReader, bin_path, dtype_for_vocab, idx_path
from megadcp.data.manifest import Counts, Manifest, Origin, load_manifest, manifest_path
from megadcp.data.merge import PairAppender, refuse_existing, rejects_path
from megadcp.data.parts_folder import PartsFolder
from megadcp.data.preprocess_worker import Failure, Recipe
from megadcp.data.progress import Progress, duration
from megadcp.data.raw_files import InputError, check_columns, find_sources
from megadcp.data.raw_parts import Part, Span, cut, lines_before, part_bytes, shard_range
from megadcp.data.tokenizer import open_tokenizer
from megadcp.data.worker_pool import PartFailed, WorkerDied, WorkerPool

Say = Callable[[str], None]


@dataclass(frozen=True)
class Preprocess:
    """One job. shard = (i, n) with 0 <= i < n; tokenizer_path and eod_token as in open_tokenizer; part_size 0 chooses one."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_kind: str = "sentencepiece"
    tokenizer_path: str = ""
    eod_token: str = ""
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    shard: tuple[int, int] = (0, 1)
    bad_records: str = "stop"
    overwrite: bool = False
    console: str = "plain"
    part_size: int = 0

    def prefixes(self) -> list[str]:
        """Output prefix of each key."""
        return [self.output_prefix if len(self.keys) == 1 else f"{self.output_prefix}_{key}" for key in self.keys]


def preprocess(job: Preprocess, say: Say = print) -> list[Manifest]:
    """Do the job and return the manifest of each key's pair. `say` gets a line for everything worth knowing.

    UserError before anything is touched for a request that can't be met; InputError for bad input and WorkerDied for a dead worker, both
    with the finished parts kept for the next run.
    """
    run = _Run(job, say)
    done = run.already_done()
    if done:
        say(f"{', '.join(job.prefixes())}: already made from the same inputs by the same tokenizer; nothing to do (--overwrite makes it again)")
        return done
    return run.go()


def check_request(job: Preprocess) -> list[Manifest]:
    """Check a job and touch nothing: its manifests if it was done already, else none. UserError, InputError as preprocess()."""
    return _Run(job, lambda line: None).already_done()


@dataclass
class _Tally:
    """What is known of the parts strung together so far."""

    counts: list[Counts]
    known: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # source -> start -> (stop, lines)
    parts: int = 0
    reused: int = 0


class _Run:
    """One call of preprocess()."""

    def __init__(self, job: Preprocess, say: Say) -> None:
        """All checks of the request; touches nothing."""
        self.job, self.say = job, say
        _check_job(job)
        self.sources, ignored = find_sources(job.inputs)
        for source in self.sources:
            if source.kind == "parquet":
                check_columns(source, job.keys)
            elif source.kind == "text" and len(job.keys) > 1:
                raise UserError(f"{source.path} is plain text, one document, and can't give {len(job.keys)} keys ({', '.join(job.keys)})")
        self.total = sum(source.bytes for source in self.sources)
        tokenizer = open_tokenizer(job.tokenizer_kind, job.tokenizer_path, job.eod_token)
        self.dtype = dtype_for_vocab(tokenizer.vocab_size)
        described = {
            "kind": job.tokenizer_kind,
            "file": Path(job.tokenizer_path).name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
        }
        self.origin = Origin(job.keys, described, job.append_eod, tuple(self.sources), job.shard)
        self.part_size = job.part_size or part_bytes(self.total)
        identity = f"{self.origin.identity()} {self.part_size}"
        self.folder = PartsFolder(job.output_prefix, identity)
        self.stop_at_bad = job.bad_records == "stop"
        self.recipe = Recipe(
            identity,
            str(self.folder.path),
            tuple(self.sources),
            job.keys,
            (job.tokenizer_kind, job.tokenizer_path, job.eod_token),
            tokenizer.fingerprint,
            self.dtype.name,
            job.append_eod,
            self.stop_at_bad,
        )
        first, stop = shard_range(self.total, job.shard)
        self.tally = _Tally([Counts() for _ in job.keys])
        self.share = min(stop, self.total) - first  # bytes
        self.ignored = ignored

    def already_done(self) -> list[Manifest]:
        """The manifests of an output that is complete and the same; empty if it must be made. Refuses to replace another one."""
        if self.job.overwrite:
            return []
        manifests = []
        for prefix in self.job.prefixes():
            manifest = load_manifest(prefix)
            if manifest is None:
                if not self.folder.is_ours():
                    refuse_existing(prefix, False, " without a manifest that says what made it")
                continue
            difference = manifest.origin.difference(self.origin)
            if not difference and self.stop_at_bad and manifest.counts.rejected:
                difference = f"with --bad-records skip, leaving out {manifest.counts.rejected} bad records"
            if difference:
                refuse_existing(prefix, False, f", made from something else ({difference})")
            if bin_path(prefix).exists() and idx_path(prefix).exists():
                reader = IndexedReader(prefix)
                if (reader.documents, reader.tokens_total) != (manifest.counts.documents, manifest.counts.tokens):
                    raise UserError(f"{manifest_path(prefix)} and {idx_path(prefix)} do not belong together: make the dataset again with --overwrite")
                manifests.append(manifest)
        return manifests if len(manifests) == len(self.job.keys) else []

    def go(self) -> list[Manifest]:
        """Make the parts, string them together, rename."""
        self._announce()
        self.folder.take()
        try:
            manifests, progress = self._work()
            self.folder.remove()
        except PartFailed as failed:
            raise self._explain(failed.args[0]) from None
        except WorkerDied as error:
            raise WorkerDied(f"{error}. Finished parts are kept in {self.folder.path}: the same command goes on from there") from None
        finally:
            self.folder.release()
        self._summary(manifests, progress)
        return manifests

    def _work(self) -> tuple[list[Manifest], Progress]:
        job = self.job
        progress = Progress(self.share, self.say, job.console)
        with ExitStack() as stack:
            writers = []
            for number, prefix in enumerate(job.prefixes()):
                temporary = [self.folder.path / f"whole.{number}{ending}" for ending in (".bin", ".idx")]
                writers.append(stack.enter_context(PairAppender(prefix, self.dtype, temporary)))
            with WorkerPool(self.recipe, job.workers) as pool, progress:
                for part, summary in self._in_order(pool, progress):
                    self._append(writers, part, summary)
            rejects = self._write_rejects()
            for prefix, writer in zip(job.prefixes(), writers, strict=True):
                manifest_path(prefix).unlink(missing_ok=True)
                writer.finish()
        manifests = []
        for number, (prefix, writer) in enumerate(zip(job.prefixes(), writers, strict=True)):
            rejects_path(prefix).unlink(missing_ok=True)
            if rejects is not None:
                shutil.copyfile(rejects, rejects_path(prefix))
            manifests.append(Manifest(job.keys[number], self.dtype.name, self.tally.counts[number], writer.crc32, self.origin))
            manifests[-1].save(prefix)
        return manifests, progress

    def _in_order(self, pool: WorkerPool, progress: Progress) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, summary) of every part, in corpus order: those that an earlier run finished and those of the workers."""
        ready: dict[int, dict[str, Any]] = {}

        def missing() -> Iterator[Part]:
            for part in cut(self.sources, self.job.shard, self.part_size):
                summary = self.folder.finished(part, not self.stop_at_bad)
                if summary is None:
                    yield part
                else:
                    ready[part.index] = summary
                    self.tally.reused += 1
                    progress.reuse(part.weight)

        def made() -> Iterator[None]:
            for part, summary in pool.run(missing()):
                ready[part.index] = summary
                progress.add(summary["keys"][0]["documents"], summary["text_bytes"], sum(key["tokens"] for key in summary["keys"]), part.weight)
                yield
            yield  # for reused parts after the last new one

        following = 0
        for _ in made():
            while following in ready:
                yield following, ready.pop(following)
                following += 1
        if ready:
            raise RuntimeError(f"part {following} is missing while later ones are finished")

    def _append(self, writers: list[PairAppender], part: int, summary: dict[str, Any]) -> None:
        common = (summary["text_bytes"], summary["rejected"], summary["blank_lines"])
        for number, (writer, key) in enumerate(zip(writers, summary["keys"], strict=True)):
            empty = writer.empty
            writer.append(self.folder.part(part, f".{number}"))
            self.tally.counts[number] += Counts(key["documents"], key["sequences"], key["tokens"], writer.empty - empty, key["with_eod"], *common)
        for source, start, stop, lines in summary["spans"]:
            if self.sources[source].kind in ("jsonl", "parquet"):
                self.tally.known.setdefault(source, {})[start] = (stop, lines)
        self.tally.parts += 1

    def _line(self, span: Span, line: int) -> int | None:
        """Number from 1 of a line (row) in its file; None for a file that is one document."""
        source = self.sources[span.source]
        if source.kind == "text":
            return None
        return 1 + line + (lines_before(source, span, self.tally.known.get(span.source, {})) if span.start else 0)

    def _explain(self, failure: Failure) -> Exception:
        """The error that a person sees for a part that could not be made."""
        if not failure.is_input:
            return RuntimeError(failure.message)
        if failure.span is None:
            return InputError(failure.message)
        line = self._line(failure.span, failure.line)
        place = self.sources[failure.span.source].path + (f":{line}" if line else "")
        return InputError(f"{place}: {failure.message}; mend the record, or leave bad ones out with --bad-records skip")

    def _write_rejects(self) -> Path | None:
        """All rejected records with file, line and reason in one file of the parts folder."""
        target = self.folder.path / "rejects"
        with open(target, "w", encoding="utf-8") as file:
            for span, line, reason, record in self.folder.rejects(self.tally.parts):
                place = Span(*span)
                row = {"file": self.sources[place.source].path, "line": self._line(place, line), "reason": reason, "record": record}
                file.write(json.dumps(row) + "\n")
        return target if self.tally.counts[0].rejected else None

    # ------------------------------------------------------------------------------------------------------- what is said
    def _announce(self) -> None:
        job = self.job
        shard = f", shard {job.shard[0]}/{job.shard[1]} is {self.share / 1e6:,.1f} MB of it" if job.shard[1] > 1 else ""
        ignored = f" ({self.ignored:,} files of other kinds passed over)" if self.ignored else ""
        name = job.tokenizer_path or job.tokenizer_kind
        self.say(f"{len(self.sources):,} input file{'s' if len(self.sources) > 1 else ''}, {self.total / 1e6:,.1f} MB{shard}{ignored}")
        workers = f"{job.workers} workers" if job.workers > 1 else "one worker"
        self.say(f"tokenizer {name}: {self.origin.tokenizer['vocab_size']:,} ids, kept as {self.dtype.name}; {workers}")

    def _summary(self, manifests: list[Manifest], progress: Progress) -> None:
        from megadcp.data.pictures import length_histogram_text

        reused = f"; {self.tally.reused} of {self.tally.parts} parts were there from an interrupted run" if self.tally.reused else ""
        self.say(f"{duration(progress.seconds)} for this: {progress.rates()}{reused}")
        for prefix, manifest in zip(self.job.prefixes(), manifests, strict=True):
            for line in describe(prefix, manifest):
                self.say(line)
            lengths = IndexedReader(prefix).lengths
            if len(lengths):
                self.say(length_histogram_text(lengths))


def describe(prefix: str, manifest: Manifest) -> list[str]:
    """What is in a pair, in words."""
    counts = manifest.counts
    size = bin_path(prefix).stat().st_size
    lines = [f"{prefix}.bin/.idx: {counts.documents:,} documents, {counts.tokens:,} tokens of {manifest.dtype}, {size / 1e6:,.1f} MB"]
    if counts.empty_documents:
        lines.append(f"  {counts.empty_documents:,} documents are empty; training passes over them")
    if counts.blank_lines:
        lines.append(f"  {counts.blank_lines:,} blank lines were passed over")
    if counts.rejected:
        lines.append(f"  {counts.rejected:,} bad records were left out: {rejects_path(prefix)} says which and why")
    if counts.documents_with_eod_in_text:
        forged = f"{counts.documents_with_eod_in_text:,} documents hold the end-of-document id inside their text"
        lines.append(f"  warning: {forged}; borders are in the index, never take them from the id")
    return lines


def _check_job(job: Preprocess) -> None:
    index, count = job.shard
    if not 0 <= index < count:
        raise UserError(f"--shard {index}/{count}: legal are 0/{max(count, 1)} to {max(count, 1) - 1}/{max(count, 1)} (i of n, counted from 0)")
    if job.workers < 1:
        raise UserError(f"--workers {job.workers}: at least 1")
    if job.bad_records not in ("stop", "skip"):
        raise UserError(f"--bad-records {job.bad_records}: legal are stop and skip")
    if not job.keys or len(set(job.keys)) != len(job.keys) or "" in job.keys:
        raise UserError(f"--json-keys {' '.join(job.keys)}: give one or more keys, each once")
    if len(job.keys) > 1 and any(os.sep in key for key in job.keys):
        raise UserError(f"--json-keys {' '.join(job.keys)}: with several keys each names a file, so none may hold {os.sep!r}")
    if not Path(job.output_prefix).name or Path(job.output_prefix).is_dir():
        raise UserError(f"--output-prefix {job.output_prefix}: a path and the begin of a file name, like {Path(job.output_prefix) / 'corpus'}")
