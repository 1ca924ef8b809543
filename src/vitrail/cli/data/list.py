"""`vitrail data list`: sets by name."""

from vitrail.cli import output


def main(json: bool = False) -> None:
    """Show the public sets that can be got, and those that are here.

    Args:
        json: Print JSON.
    """
    from vitrail.data import public_datasets
    from vitrail.files import get_data_home

    here = {one.name: one for one in public_datasets.list_downloaded_datasets()}
    if json:
        rows = [
            {
                "name": name,
                "what": known.description,
                "terms": known.terms,
                "images": dict(known.splits),
                "stored_bytes": here[name].bytes if name in here else None,
            }
            for name, known in public_datasets.PUBLIC_DATASETS.items()
        ]
        output.print_json({"folder": str(get_data_home() / "data"), "sets": rows})
        return
    table = [("name", "what it is", "images", "here", "terms")]
    for name, known in public_datasets.PUBLIC_DATASETS.items():
        stored = output.format_bytes(here[name].bytes) if name in here else "-"
        table.append((name, known.description, output.format_count(sum(known.splits.values())), stored, known.terms))
    output.print_table(table, right=(2, 3))
    print(f"\nvitrail data get NAME fetches one into {get_data_home() / 'data'}; vitrail data remove NAME deletes it.")
