"""`vitrail demo`: a model from nothing to an answer."""

from vitrail.cli import show


def main(json: bool = False) -> None:
    """Build the smallest preset with random weights and let it name a picture of coloured panes.

    Args:
        json: Print JSON.
    """
    from vitrail.predict import Classifier
    from vitrail.weights.trained import random

    show.note("building ti16 with random weights; it has learned nothing, so every class is equally likely")
    classify = Classifier(random("ti16", num_classes=10))
    [answer] = classify([_window()], top=3)
    if json:
        show.as_json([{"label": label, "probability": probability} for label, probability in answer])
        return
    for label, probability in answer:
        print(f"{label}: {probability:.1%}")


def _window() -> bytes:
    """A stained-glass window of 14 x 14 panes as PNG bytes."""
    import io

    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[:14, :14]
    panes = np.stack([rows * 18, columns * 18, (rows + columns) % 7 * 36], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(panes).resize((224, 224), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
