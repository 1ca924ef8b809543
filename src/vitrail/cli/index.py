"""`vitrail index FEATURES --out INDEX`: make the features of images searchable."""

from vitrail.api import search
from vitrail.cli import output
from vitrail.cli.arguments.search import IndexArguments
from vitrail.formatting import format_bytes, format_count


def run(arguments: IndexArguments) -> None:
    """Write the index, and say what it holds."""
    index = search.index(
        arguments.features,
        arguments.out,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        progress=output.show_progress,
        notify=output.print_note,
    )
    record = index.record
    num_bytes = sum(path.stat().st_size for path in index.path.iterdir())
    if arguments.output.json:
        facts = {key: record[key] for key in ("images", "left_out", "width", "dtype", "features", "model_name")}
        output.print_json({"written": str(arguments.out), "bytes": num_bytes, **facts})
        return
    output.print_table(
        [
            ("images", format_count(record["images"])),
            ("features", f"{record['features']}, {record['width']:,} per image, {record['dtype']}"),
            ("model", record["model_name"] or f"weights {record['model']['weights'][:12]}"),
            ("written", f"{arguments.out} ({format_bytes(num_bytes)})"),
        ]
    )
