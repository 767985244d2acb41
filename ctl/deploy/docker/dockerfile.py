"""The text of a Dockerfile and of its .dockerignore.

What changes least comes first, so that a change of the program builds one small layer. The process is
Python itself, number 1 in its container: it gets SIGTERM directly, and ctl saves and ends with 143.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ctl.deploy.docker.project import SOURCE_TREE, Project, is_wheel

USER_ID = 1000
_NVIDIA = (  # where Google's and other container hosts put the driver; the CUDA wheels bring the rest
    "LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
    "NVIDIA_VISIBLE_DEVICES=all",
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
)
_PACKAGES = """$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"""
_NEVER = ("**/__pycache__", "**/*.pyc", "**/.git", "**/.env", "**/*.pem", "**/*credentials*.json")


@dataclass(frozen=True)
class Recipe:
    """What the image is made of.

    Attributes:
      base: the image to begin with.
      tensorflow: a version, such as "2.21.0".
      gpu: with the CUDA wheels.
      root: run as root; else as user 1000.
      slim: without TensorFlow's C++ headers, which only a build of custom ops reads.
    """

    base: str
    tensorflow: str
    gpu: bool
    root: bool
    slim: bool = False


def dockerfile(recipe: Recipe, project: Project, command: Sequence[str], args: Sequence[str]) -> str:
    """The Dockerfile, without the comment on top."""
    blocks = [f"FROM {recipe.base}", _environment(recipe)]
    if not recipe.root:
        blocks.append(
            "# a fixed number, so that volumes can belong to it\n"
            f"RUN useradd --uid {USER_ID} --create-home --shell /usr/sbin/nologin trainer"
        )
    blocks += ["WORKDIR /app", *_packages(recipe, project)]
    blocks.append(
        "# the program, last: it changes most\n"
        + "\n".join(f"COPY {path} /app/{path}" for path in project.copied)
    )
    end = ["STOPSIGNAL SIGTERM", f"ENTRYPOINT {json.dumps(list(command))}"]
    if args:
        end.append(f"CMD {json.dumps(list(args))}")
    user = [] if recipe.root else [f"USER {USER_ID}:{USER_ID}"]
    return "\n\n".join([*blocks, "\n".join([*user, *end])]) + "\n"


def dockerignore(project: Project) -> str:
    """Everything is left out but what the build reads."""
    return "\n".join(["*", *(f"!{path}" for path in project.context), *_NEVER]) + "\n"


def _environment(recipe: Recipe) -> str:
    pairs = ["PYTHONUNBUFFERED=1", "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_ROOT_USER_ACTION=ignore"]
    if recipe.gpu:
        pairs += _NVIDIA
    return "ENV " + " \\\n    ".join(pairs)


def _packages(recipe: Recipe, project: Project) -> list[str]:
    """The layers of packages, the largest first."""
    pip, blocks = "RUN pip install --no-cache-dir", []
    if project.constraints != "none":
        blocks.append(f"COPY {project.constraints} /opt/{project.constraints}")
        pip += f" --constraint /opt/{project.constraints}"
    extra = "[and-cuda]" if recipe.gpu else ""
    blocks.append(
        f'# the largest layer\n{pip} "tensorflow{extra}=={recipe.tensorflow}"'
        + (f' \\\n    && rm -rf "{_PACKAGES}/tensorflow/include"' if recipe.slim else "")
    )
    if project.requirements != "none":
        blocks.append(
            f"COPY {project.requirements} /opt/{project.requirements}\n"
            f"{pip} --requirement /opt/{project.requirements}"
        )
    if project.ctl == ".":
        *files, folder = SOURCE_TREE
        blocks.append(f"COPY {' '.join(files)} /opt/ctl/\nCOPY {folder} /opt/ctl/{folder}\n{pip} /opt/ctl")
    elif is_wheel(project.ctl):
        name = project.ctl.rpartition("/")[2]
        blocks.append(f"COPY {project.ctl} /opt/{name}\n{pip} /opt/{name}")
    elif project.ctl != "none":
        git = (
            "# pip needs git for this\nRUN apt-get update \\\n    && apt-get install --yes "
            "--no-install-recommends git \\\n    && rm -rf /var/lib/apt/lists/*\n"
        )
        blocks.append((git if project.ctl.startswith("git+") else "") + f'{pip} "{project.ctl}"')
    return blocks
