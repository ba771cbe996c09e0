"""Cut the photographs that come with scikit-learn into tiles of 32 x 32 pixels: data/china/*.png, data/flower/*.png."""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_images

FOLDER = Path(__file__).parent / "data"
SIDE = 32


def main(tiles_max: int = 1000) -> None:
    """Write up to `tiles_max` tiles of each photograph."""
    found = load_sample_images()
    for path, pixels in zip(found.filenames, found.images, strict=True):
        folder = FOLDER / Path(path).stem
        folder.mkdir(parents=True, exist_ok=True)
        rows, columns = (size // SIDE for size in pixels.shape[:2])
        for number in range(min(tiles_max, rows * columns)):
            top, left = (SIDE * k for k in divmod(number, columns))
            Image.fromarray(pixels[top : top + SIDE, left : left + SIDE]).save(folder / f"{number:03}.png")


if __name__ == "__main__":
    main()
