"""`vitrail data remove NAME`: room for something else."""

from typing import Annotated

import tyro

from vitrail.cli import output


def main(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    json: bool = False,
) -> None:
    """Delete a set that `vitrail data get` stored.

    Args:
        name: One of those that `vitrail data list` shows as here.
        json: Print JSON.
    """
    from vitrail.data import public_datasets

    freed = {one.name: one.bytes for one in public_datasets.list_downloaded_datasets()}
    public_datasets.remove_dataset(name)
    if json:
        output.print_json({"removed": name, "bytes": freed.get(name, 0)})
        return
    output.print_table([("removed", f"{name} ({output.format_bytes(freed.get(name, 0))})")])
