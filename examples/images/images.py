"""Features of small images: colours, brightness, and how much of them is edges."""

import numpy as np
from PIL import Image, ImageFilter

from pipedist.combiners import by_key_moments


def features(shard):
    """Return the features of each image of uint8[n, height, width, 3]."""
    pixels = shard["image"]
    grey = [Image.fromarray(image).convert("L") for image in pixels]
    edges = [np.asarray(image.filter(ImageFilter.FIND_EDGES))[1:-1, 1:-1].mean() for image in grey]
    return {
        "label": shard["label"],
        "colour": pixels.mean(axis=(1, 2)),
        "brightness": np.array([np.asarray(image).mean() for image in grey]),
        "edges": np.array(edges),
        "histogram": np.stack([np.bincount(image.ravel() >> 5, minlength=8) for image in pixels]),
    }


def edges_by_label(features):
    """Return the moments of the edges, by the folder of the image."""
    return by_key_moments.of(features["label"], features["edges"])
