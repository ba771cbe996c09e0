"""Draws the picture of each job of the gallery from its results."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a tenth of the size
matplotlib.rcParams.update(
    {"svg.hashsalt": "pipedist", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)

import matplotlib.pyplot as plt  # noqa: E402 (the backend comes first)
import numpy as np  # noqa: E402

EXAMPLES = Path(__file__).parent
BLUE = "#3566b0"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def flights(out: Path, axes: plt.Axes) -> None:
    carriers = json.loads((out / "carriers.json").read_text())
    found = sorted((entry["mean"], name) for name, entry in carriers.items())
    axes.barh([name for _, name in found], [mean for mean, _ in found], color=BLUE)
    axes.set_xlabel("mean arrival delay, minutes")


def words(out: Path, axes: plt.Axes) -> None:
    counts = np.array(json.loads((out / "by_length.json").read_text()))
    axes.bar(np.arange(1, 21), counts, color=BLUE)
    axes.set_xticks(range(1, 21))
    axes.set_xlabel("letters in a word")
    axes.set_ylabel("words")


def sweep(out: Path, axes: plt.Axes) -> None:
    found = rows(out / "rows.csv")
    costs, gammas = (sorted({float(row[key]) for row in found}) for key in ("cost", "gamma"))
    grid = np.zeros((len(costs), len(gammas)))
    for row in found:
        grid[costs.index(float(row["cost"])), gammas.index(float(row["gamma"]))] += float(row["accuracy"])
    grid /= len(found) / grid.size
    image = axes.imshow(grid, origin="lower", cmap="viridis", vmin=0.9)
    axes.set_xticks(range(len(gammas)), [f"{x:g}" for x in gammas])
    axes.set_yticks(range(len(costs)), [f"{x:g}" for x in costs])
    axes.set_xlabel("gamma")
    axes.set_ylabel("C")
    plt.colorbar(image, ax=axes, label="mean accuracy, 5 folds")


def llm(out: Path, axes: plt.Axes) -> None:
    found = rows(out / "accuracy.csv")
    names = [row["key"] for row in found]
    axes.bar(names, [100 * float(row["mean"]) for row in found], color=BLUE)
    axes.set_ylabel("right answers, %")
    axes.set_ylim(0, 100)


def filetypes(out: Path, axes: plt.Axes) -> None:
    found = [[*row["value"].split(" -> "), row["count"]] for row in rows(out / "confusion.csv")]
    wanted, seen = (sorted({row[i] for row in found}) for i in (0, 1))
    grid = np.zeros((len(wanted), len(seen)))
    for ending, label, count in found:
        grid[wanted.index(ending), seen.index(label)] = int(count)
    axes.imshow(grid, cmap="Blues")
    axes.set_xticks(range(len(seen)), seen, rotation=90)
    axes.set_yticks(range(len(wanted)), wanted)
    axes.set_xlabel("type found from the bytes")
    axes.set_ylabel("ending of the name")


def climate(out: Path, axes: plt.Axes) -> None:
    trend = np.load(out / "trend.npy")
    image = axes.imshow(
        trend, extent=(-180, 180, -90, 90), cmap="coolwarm", vmin=0, vmax=0.7, rasterized=True
    )
    axes.set_xlabel("longitude")
    axes.set_ylabel("latitude")
    plt.colorbar(image, ax=axes, label="trend, °C a decade", shrink=0.7)


def images(out: Path, axes: plt.Axes) -> None:
    found = np.load(out / "features.npz")
    for label, marker in zip(sorted(set(found["label"].tolist())), "os", strict=True):
        mine = found["label"] == label
        colours = found["colour"][mine] / 255
        axes.scatter(found["brightness"][mine], found["edges"][mine], 14, colours, marker, label=label)
    axes.set_xlabel("brightness")
    axes.set_ylabel("edges")
    axes.legend()


DRAW: dict[str, Callable[[Path, plt.Axes], None]] = {
    "climate": climate,
    "filetypes": filetypes,
    "flights": flights,
    "images": images,
    "llm": llm,
    "sweep": sweep,
    "words": words,
}


def draw(name: str, out: Path) -> None:
    """Draw the picture of a job from the files of its output folder."""
    figure, axes = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    DRAW[name](out, axes)
    figure.savefig(EXAMPLES / name / "picture.svg", metadata={"Date": None})
    plt.close(figure)
