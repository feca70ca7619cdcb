"""Answers a whole file of inputs. Answers are kept, so that an interrupted run continues where it stopped.

`OUT.part` collects them as lines of JSON: first the names of file and network, then the answers to some rows at a time
with a hash of all inputs so far. At the end it becomes OUT, in the format of its suffix.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from isobatch.cluster.client import chunks
from isobatch.deployments.prepare.data import Row, naming_rows
from isobatch.deployments.tasks import Outputs
from isobatch.profiles.errors import UserError, json_in

FORMATS = (".csv", ".jsonl", ".parquet")
PART = ".part"
ROWS_PER_GROUP = 4096  # of a Parquet file
# The fields of an output that are written.
_FIELDS = (
    "label", "name", "score", "labels", "tokens", "entities", "height", "width", "runs", "points", "scores",
    "exit_block",
)  # fmt: skip
Answerer = Callable[[Sequence[Any]], list[Outputs]]


def check_out(out: Path, replace: bool) -> None:
    """Raise UserError if answers cannot be written to this file."""
    if out.suffix not in FORMATS:
        raise UserError(f"--out {out}: its suffix must be one of {', '.join(FORMATS)}")
    if out.exists() and not replace:
        raise UserError(f"{out} exists: --force replaces it")
    if out.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise UserError(f"{out}: writing it needs pyarrow: pip install 'isobatch[parquet]'") from error


def part_of(out: Path) -> Path:
    """The file that collects the answers until there are all.

    >>> part_of(Path("answers.csv")).name
    'answers.csv.part'
    """
    return out.with_name(out.name + PART)


def kept_in(part: Path, job: Mapping[str, Any]) -> tuple[int, str]:
    """How many rows an earlier run of this job has answered, and the hash of their inputs.

    A line that was not written to its end is removed. Fields that an earlier version did not note count as equal.
    """
    if not part.exists():
        return 0, ""
    try:
        rows, digest, whole = _counted(part, job)
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError):
        raise UserError(f"{part} is not of isobatch predict: --force replaces it") from None
    with part.open("ab") as file:
        file.truncate(whole)
    return rows, digest


def _counted(part: Path, job: Mapping[str, Any]) -> tuple[int, str, int]:
    """The answered rows, the hash of their inputs, and the bytes of all whole lines."""
    rows, digest, whole = 0, "", 0
    with part.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            content = json_in(line.decode(), part)
            if "job" not in content:
                rows, digest = rows + len(content["outputs"]), content["digest"]
            elif others := [name for name in job if content["job"].get(name, job[name]) != job[name]]:
                before = f"another {others[0]} ({content['job'][others[0]]}, now {job[others[0]]})"
                raise UserError(f"{part} holds answers with {before}: --force starts again")
            whole += len(line)
    return rows, digest, whole


def answer_rows(
    data: Path, rows: Iterable[Row], answer: Answerer, part: Path, job: Mapping[str, Any], at_once: int
) -> int:
    """Answer the rows of `data` that no earlier run has answered, `at_once` at a time. Return the number of answers."""
    done, kept = kept_in(part, job)
    digest, remaining = sha256(), iter(rows)
    for row in islice(remaining, done):
        digest.update(_bytes_of(row.value))
    if done and digest.hexdigest() != kept:
        raise UserError(f"the first {done} rows are not those that {part} answers: --force starts again")
    for some in chunks(remaining, at_once):
        with naming_rows(data, some):
            outputs = answer([row.value for row in some])
        for row in some:
            digest.update(_bytes_of(row.value))
        written = [_record(row.number, output) for row, output in zip(some, outputs, strict=True)]
        lines: list[Mapping[str, Any]] = [] if done else [{"job": job}]
        lines.append({"digest": digest.hexdigest(), "outputs": written})
        with part.open("a") as file:  # only now, so that a run that fails before its first answers leaves no file
            file.writelines(json.dumps(line) + "\n" for line in lines)
        done += len(some)
    part.touch()  # a file without rows has no answers
    return done


def finish(part: Path, out: Path, separator: str = ",") -> None:
    """Turn the collected answers into the file that the user wants. `separator`: between several labels in a cell."""
    draft = part.with_name(part.name + out.suffix)
    _WRITERS[out.suffix](part, draft, separator)
    draft.replace(out)
    part.unlink()


def _bytes_of(value: Any) -> bytes:
    return value.tobytes() if hasattr(value, "tobytes") else json.dumps(value).encode()


def _record(number: int, output: Outputs) -> Outputs:
    fields = {name: output[name] for name in _FIELDS if name in output}
    return {"row": number, **fields, "truncated": bool(output.get("truncated", False))}


def _records(part: Path) -> Iterator[Outputs]:
    with part.open() as file:
        for line in file:
            yield from json.loads(line).get("outputs", ())


def _write_lines(part: Path, out: Path, _: str) -> None:
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in _records(part))


def _write_csv(part: Path, out: Path, separator: str) -> None:
    """With a column for each label whose probability any row lists; several labels of an input are in one cell."""
    names = {each["label"]: each["name"] for record in _records(part) for each in record.get("scores", ())}
    count = Counter(names.values())
    unlike = {label: name if count[name] == 1 else f"{name} ({label})" for label, name in names.items()}
    columns = list(dict.fromkeys(name for record in _records(part) for name in _flat(record, unlike, separator)))
    with out.open("w", encoding="utf-8", newline="") as file:
        if columns:
            table = csv.DictWriter(file, columns, restval="")
            table.writeheader()
            table.writerows(_flat(record, unlike, separator) for record in _records(part))


def _flat(record: Outputs, names: Mapping[Any, str], separator: str = ",") -> Outputs:
    """`names`: a name of its own for each label.

    >>> _flat({"row": 1, "name": "b", "scores": [{"label": 1, "name": "b", "score": 0.7}, {"label": 0, "name": "a",
    ... "score": 0.3}]}, {0: "a", 1: "b"})
    {'row': 1, 'name': 'b', 'score of a': 0.3, 'score of b': 0.7}
    """
    if "labels" in record:
        own = [each["name"] for each in record["labels"]]
        if apart := next((name for name in own if separator in name), None):
            raise UserError(f"label {apart!r} contains {separator!r}: --label-separator names another sign for cells")
        record["labels"] = separator.join(own)
    listed = sorted(record.pop("scores", ()), key=lambda each: int(each["label"]))
    return record | {f"score of {names[each['label']]}": each["score"] for each in listed}


def _write_parquet(part: Path, out: Path, _: str) -> None:
    """The columns and types are those of all rows together, because the first rows may lack some."""
    import pyarrow as pa
    from pyarrow import parquet

    schemas = list(dict.fromkeys(map(_schema, chunks(_records(part), ROWS_PER_GROUP))))
    if not schemas:
        raise UserError(f"{out}: there are no answers to write")
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    with parquet.ParquetWriter(out, schema) as writer:
        for some in chunks(_records(part), ROWS_PER_GROUP):
            writer.write_table(pa.Table.from_pylist(some, schema))


def _schema(records: Sequence[Outputs]) -> Any:
    import pyarrow as pa

    names = dict.fromkeys(name for record in records for name in record)
    return pa.table({name: [record.get(name) for record in records] for name in names}).schema


_WRITERS: Mapping[str, Callable[[Path, Path, str], None]] = {
    ".csv": _write_csv,
    ".jsonl": _write_lines,
    ".parquet": _write_parquet,
}
