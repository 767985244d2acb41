"""Five classes of real JPEGs, cropped from drawings or from pictures of scikit-image and scikit-learn.

    python photos.py DIRECTORY --per_class=40

They replace flower_photos.tgz: the same layout and about the same size of a photo. As a program it
uses the pictures, which need the extra `slow`.
"""

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf

HEIGHT, WIDTH = 240, 320
CLASSES = ("brick", "china", "flower", "grass", "gravel")


def photographed() -> dict[str, np.ndarray]:
    """Returns uint8 pictures `[h, w, 1 or 3]` by class. Needs the extra `slow`."""
    import skimage.data
    from sklearn.datasets import load_sample_image

    grey = {name: getattr(skimage.data, name)()[..., None] for name in ("brick", "grass", "gravel")}
    return {**grey, **{name: load_sample_image(f"{name}.jpg") for name in ("china", "flower")}}


def draw_pictures() -> dict[str, np.ndarray]:
    """Returns uint8 images `[512, 512, 1 or 3]` by class: waves with a separate length and direction."""
    random, (y, x) = np.random.default_rng(1), np.mgrid[:512, :512]
    image_by_class = {}
    for i, name in enumerate(CLASSES):
        waves = 128 + 70 * np.sin(2 * np.pi * (x * np.cos(i) + y * np.sin(i)) / (8 + 6 * i))
        colors = 1 - 0.3 * random.random(3 if name in ("china", "flower") else 1)
        noise = random.normal(0, 2, (512, 512, 1))
        image_by_class[name] = np.clip(waves[..., None] * colors + noise, 0, 255).astype(np.uint8)
    return image_by_class


def jpeg(image: np.ndarray, **options) -> bytes:
    return tf.io.encode_jpeg(image, **options).numpy()


def make(directory, per_class=40, *, height=HEIGHT, width=WIDTH, sources=draw_pictures) -> Path:
    """Writes `directory/flower_photos/<class>/<i>.jpg` and a licence; returns directory/flower_photos."""
    random, root = np.random.default_rng(0), Path(directory) / "flower_photos"
    for name, picture in sources().items():
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            first_row = random.integers(picture.shape[0] - height + 1)
            first_column = random.integers(picture.shape[1] - width + 1)
            crop = picture[first_row : first_row + height, first_column : first_column + width]
            (root / name / f"{i:04d}.jpg").write_bytes(jpeg(np.ascontiguousarray(crop)))
    (root / "LICENSE.txt").write_text("made of drawings, or of pictures of scikit-image and scikit-learn\n")
    return root


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--per_class", type=int, default=40)
    options = parser.parse_args()
    print(make(options.directory, options.per_class, sources=photographed))
