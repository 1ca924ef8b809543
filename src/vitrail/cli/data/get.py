"""`vitrail data get NAME`: public sets by name."""

from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli import output


def main(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    files: Annotated[tuple[Path, ...], tyro.conf.arg(name="from", metavar="FILE ...")] = (),
    json: bool = False,
) -> None:
    """Fetch a public set, verify it and store it as tar shards; from then on its name is a DATA.

    Args:
        name: One of those that `vitrail data list` shows.
        files: The set's own archives, where they are on this machine already.
        json: Print JSON.
    """
    from vitrail.data import public_datasets

    with output.show_progress(f"fetching {name}", of_bytes=True) as progress:
        folder = public_datasets.download_dataset(name, files, progress=progress, note=output.print_note)
    stored = next(one for one in public_datasets.list_downloaded_datasets() if one.name == name)
    if json:
        output.print_json({"name": name, "folder": str(folder), "images": dict(stored.images), "bytes": stored.bytes})
        return
    images = ", ".join(f"{split} {output.format_count(number)}" for split, number in stored.images.items() if number)
    output.print_table(
        [
            ("images", images),
            ("terms", public_datasets.PUBLIC_DATASETS[name].terms),
            ("stored", f"{folder} ({output.format_bytes(stored.bytes)})"),
        ]
    )
