"""`vitrail data list`: sets by name."""

from vitrail.cli import show


def main(json: bool = False) -> None:
    """Show the public sets that can be got, and those that are here.

    Args:
        json: Print JSON.
    """
    from vitrail.data import public
    from vitrail.files import data_home

    here = {one.name: one for one in public.stored()}
    if json:
        rows = [
            {
                "name": name,
                "what": known.description,
                "terms": known.terms,
                "images": dict(known.splits),
                "stored_bytes": here[name].bytes if name in here else None,
            }
            for name, known in public.SETS.items()
        ]
        show.as_json({"folder": str(data_home() / "data"), "sets": rows})
        return
    table = [("name", "what it is", "images", "here", "terms")]
    for name, known in public.SETS.items():
        stored = show.size(here[name].bytes) if name in here else "-"
        table.append((name, known.description, show.count(sum(known.splits.values())), stored, known.terms))
    show.table(table, right=(2, 3))
    print(f"\nvitrail data get NAME fetches one into {data_home() / 'data'}; vitrail data remove NAME deletes it.")
