"""Classification of photos, one folder per class, with a small convolutional network.

python -m models.flowers --data_dir=flower_photos --model_dir=/tmp/flowers --epochs=10
python -m models.flowers --data_dir=flower_photos --model_dir=/tmp/flowers2 --strategy=mirrored
ctl launch --workers=2 -- python -m models.flowers --data_dir=flower_photos --model_dir=/tmp/flowers3
python -m models.flowers --model_dir=/tmp/flowers --mode=predict --images='new/*.jpg'
"""

import ctl
from absl import flags

from models.flowers.model import Flowers
from models.flowers.reading import Reading

DATA_DIR = flags.DEFINE_string(
    "data_dir", "", "Directory with a folder of JPEGs per class, such as an extracted flower_photos.tgz."
)
BATCH_SIZE_PER_REPLICA = flags.DEFINE_integer(
    "batch_size_per_replica",
    32,
    "Batch size of a replica; the global batch size is proportional to the number of replicas. Not with "
    "--global_batch_size.",
    lower_bound=1,
)
IMAGE_SIZE = flags.DEFINE_integer(
    "image_size",
    None,
    "Height and width of resized photos (pixels). Default: that of the run in model_dir, or 180.",
    lower_bound=8,
)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Learning rate of Adam.", lower_bound=0.0)
CACHE = flags.DEFINE_enum(
    "cache",
    "memory",
    ["memory", "none"],
    "memory: keep all decoded photos in memory; none: decode a photo each time it is used.",
)
SPLIT_SEED = flags.DEFINE_integer(
    "split_seed",
    123,
    "Seed of the split; a fifth of the photos is held out for validation.",
    lower_bound=0,
    upper_bound=2**32 - 1,
)
STRICT_DATA = flags.DEFINE_bool(
    "strict_data", False, "Exit with 2 if a file cannot be used, instead of skipping it."
)
MAX_PIXELS = flags.DEFINE_integer(
    "max_pixels", Reading.max_pixels, "Photos with more pixels are skipped.", lower_bound=1
)
IMAGES = flags.DEFINE_string(
    "images", "", "For --mode=predict: paths and patterns separated by commas, or a directory."
)


def flowers(**options):
    """Returns the trainer for the values of the flags."""
    per_replica: int | None = BATCH_SIZE_PER_REPLICA.value
    if flags.FLAGS["global_batch_size"].present:
        if flags.FLAGS["batch_size_per_replica"].present:
            raise ctl.UsageError(
                f"got --batch_size_per_replica={per_replica} and "
                f"--global_batch_size={options['global_batch_size']}; expected one of them."
            )
        per_replica = None
    reading = Reading(
        cache=CACHE.value, strict=STRICT_DATA.value, max_pixels=MAX_PIXELS.value,
        split_seed=SPLIT_SEED.value,
    )  # fmt: skip
    return Flowers(batch_size_per_replica=per_replica, reading=reading, **options)


if __name__ == "__main__":
    ctl.run(flowers, data_dir=DATA_DIR, image_size=IMAGE_SIZE, images=IMAGES, learning_rate=LEARNING_RATE)
