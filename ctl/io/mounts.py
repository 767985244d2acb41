"""File systems of mounted object stores, which lack an atomic rename."""

import contextlib
import os

_STORE_TYPES = {
    "fuse",  # a program without a name in the mount table, such as the bucket driver of Google's clusters
    "fuse.gcsfuse", "fuse.s3fs", "fuse.mountpoint-s3", "fuse.goofys", "fuse.geesefs", "fuse.blobfuse",
    "fuse.blobfuse2", "fuse.rclone", "fuse.ossfs", "fuse.cosfs", "fuse.obsfs",
}  # fmt: skip


def is_object_store(path: str) -> bool:
    """Returns True if a path without symbolic links is below the mount point of an object store."""
    return _read_mount_type(path) in _STORE_TYPES


def _read_mount_type(path: str) -> str:
    """Returns the file system type of a path without symbolic links, such as "ext4", or ""."""
    mount_point, mount_type = "", ""
    with contextlib.suppress(OSError), open("/proc/self/mounts", "rb") as file:
        for line in file:
            source, target, fs_type = os.fsdecode(line).split(" ")[:3]
            program, separator, _ = source.partition("#")
            for octal in ("\\040", "\\011", "\\012", "\\134"):
                target = target.replace(octal, chr(int(octal[1:], 8)))
            is_inside = f"{path}/".startswith(f"{target.rstrip('/')}/")
            if is_inside and len(target) >= len(mount_point):
                mount_point = target
                mount_type = f"fuse.{program}" if fs_type == "fuse" and separator else fs_type
    return mount_type
