"""`vitrail data remove NAME`: room for something else."""

from typing import Annotated

import tyro

from vitrail.cli import show


def main(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    json: bool = False,
) -> None:
    """Delete a set that `vitrail data get` stored.

    Args:
        name: One of those that `vitrail data list` shows as here.
        json: Print JSON.
    """
    from vitrail.data import public

    freed = {one.name: one.bytes for one in public.stored()}
    public.remove(name)
    if json:
        show.as_json({"removed": name, "bytes": freed.get(name, 0)})
        return
    show.table([("removed", f"{name} ({show.size(freed.get(name, 0))})")])
